"""`enable` and `disable`: a model's attention on the ring, watched in every forward pass."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from striped_cp import Layout, RingAttention, Striped, unshard_sequence

from .attention import NAME, ForwardPass
from .batch import RingBatch
from .models import attention_modules, check_model

Model = TypeVar("Model", bound=PreTrainedModel)


@dataclass
class _Enabled:
    implementation: str
    attentions: dict[str, nn.Module]
    hooks: list[RemovableHandle]


_enabled: WeakKeyDictionary[PreTrainedModel, _Enabled] = WeakKeyDictionary()


def enable(
    model: Model, mesh: DeviceMesh, *, layout: Layout | None = None, kernel: str = "auto"
) -> Model:
    """Route every attention of `model` through the ring of `mesh`, until `disable(model)`.

    The model then takes batches of `shard_batch` and nothing else. Its loss is this rank's share:
    the losses of the ranks, and their gradients, add up to those of the batch on one rank.

    Every forward pass checks that the ranks of the ring hold pieces of one batch, that position ids
    are those of the layout, and afterwards that every attention ran on the ring.

    Args:
        model: a causal model, its attention full or in sliding windows, with sinks or without;
            before FSDP, DDP, compilation or PEFT wrap it.
        mesh: of the ring, P ranks.
        layout: which rank holds which token, that of `shard_batch`; default token stripes.
        kernel: of `striped_cp.ring_attention`.

    Returns:
        `model`.

    Raises:
        ValueError: the model has softcap, chunks, an encoder or whatever else is not causal
            attention; or an unknown layout or kernel.
    """
    check_model(model)
    attend = RingAttention(mesh, layout or Striped(), kernel=kernel)
    disable(model)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f"{type(model).__name__} cannot run on the ring: its attention does not go through "
            "transformers' AttentionInterface"
        )
    attentions = attention_modules(model)
    base = model.base_model
    positional = list(inspect.signature(base.forward).parameters)

    @torch.compiler.disable
    def enter(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        named = dict(zip(positional, args, strict=False)) | kwargs
        batch = _check_batch(named, attend)
        return (), named | {"use_cache": False, "ring": ForwardPass(attend, batch.documents)}

    @torch.compiler.disable
    def leave(_module: nn.Module, _args: tuple, kwargs: dict[str, Any], _output: Any) -> None:
        passed = kwargs["ring"]
        bypassed = [n for n, m in attentions.items() if m.__dict__.pop("ring_pass", 0) != passed]
        if bypassed:
            raise ValueError(
                f"attention that did not run on the ring: {', '.join(bypassed)}; its tokens have "
                "seen those of their own rank only"
            )

    hooks = [
        base.register_forward_pre_hook(enter, with_kwargs=True),
        base.register_forward_hook(leave, with_kwargs=True),
    ]
    if model is not base:
        hooks.append(model.register_forward_pre_hook(_check_labels, with_kwargs=True))
    _enabled[model] = _Enabled(before, attentions, hooks)
    return model


def disable(model: PreTrainedModel) -> None:
    """Undo `enable`: the model's attention is again what it was. Nothing to undo is no error."""
    state = _enabled.pop(model, None)
    if state is None:
        return
    for hook in state.hooks:
        hook.remove()
    for attention in state.attentions.values():
        attention.__dict__.pop("ring_pass", None)
    model.set_attn_implementation(state.implementation)


def _check_batch(arguments: dict[str, Any], attend: RingAttention) -> RingBatch:
    batch = arguments.get("ring")
    if not isinstance(batch, RingBatch):
        raise ValueError(
            "a model on the ring takes the batches of shard_batch (missing: `ring`); "
            "call disable(model) before generate() or anything else"
        )
    for name in ("attention_mask", "cache", "past_key_values", "use_cache", "output_router_logits"):
        if arguments.get(name) is not None and arguments[name] is not False:
            raise ValueError(f"{name} is not supported on the ring: leave it out")
    assert attend.mesh is not None
    if (batch.layout, batch.mesh_shape) != (attend.layout, attend.mesh.shape):
        raise ValueError(
            f"the batch is laid out as {batch.layout.spec!r} on a mesh {batch.mesh_shape}, the "
            f"model was enabled for {attend.layout.spec!r} on {attend.mesh.shape}"
        )
    given = arguments.get("position_ids")
    if given is None or not torch.equal(given.cpu(), batch.position_ids):
        raise ValueError(
            "position_ids are not those of this rank's tokens (counted from the start of their "
            "document in the whole sequence): pass on what shard_batch returned"
        )
    mine = torch.tensor([[batch.fingerprint]], device=given.device)
    everyone = unshard_sequence(mine, mesh=attend.mesh)
    if (everyone != mine).any():
        raise ValueError(
            "the ranks of the ring hold pieces of different batches: give every rank of a ring the "
            "same sequences (with the Trainer: RingTrainerMixin)"
        )
    return batch


def _check_labels(_module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
    """Only `shift_labels` count: a loss that shifts labels itself fails on none, and says so."""
    if kwargs.get("labels") is None:
        return _args, kwargs
    for name in ("shift_labels", "num_items_in_batch"):
        if kwargs.get(name) is None:
            raise ValueError(f"labels without {name}: pass on what shard_batch returned")
    return _args, kwargs | {"labels": kwargs["labels"][:, :0]}
