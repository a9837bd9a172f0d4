"""Activation checkpointing that does not run the ring twice.

A checkpointed block is computed again in the backward pass. Attention is nearly all of that work at
1M tokens, and with context parallelism it communicates: without a second run of it the best causal
MFU that FlashAttention-2 allows on an H100 rises from 23 % to 29 % (docs/reference/memory.md). So
the outputs of the attention operator (out and LSE, one more tensor the size of the block's input)
are kept, and only the rest of the block is computed again, unless `memory.recompute_attention` asks
for the memory instead.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

import striped_cp.ops  # noqa: F401  (registers the operator)
from recipes.memory.offload import CheckpointOffload, HostTensor
from recipes.titan import logger

# The ring, and what torch runs in its place when there is no context parallelism.
ATTENTION_OPERATORS = frozenset(
    {
        torch.ops.striped_cp.ring_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_attention_math.default,
    }
)


def apply_activation_checkpointing(
    model: nn.Module,
    settings: ActivationCheckpoint,
    *,
    recompute_attention: bool,
    offload: CheckpointOffload | None,
    compiled: bool,
    base_folder: str = "",
) -> None:
    """Wrap the blocks of a model as `activation_checkpoint` says.

    Modes "full" and "selective" with every how many blocks are done here; "selective" with "op" and
    "memory_budget" are torchtitan's, the former with the ring among the operators that it saves.

    Args:
        model: has `layers`, a ModuleDict of blocks.
        recompute_attention: whether the backward pass runs attention again too.
        offload: where the checkpoints wait, None for device memory.
        compiled: whether the blocks will be compiled.
    """
    by_operator = settings.mode == "selective" and settings.selective_ac_option == "op"
    if settings.mode == "memory_budget" or by_operator:
        kept = _op_sac_save_list - ATTENTION_OPERATORS
        apply_ac(
            model,
            settings,
            model_compile_enabled=compiled,
            op_sac_save_list=kept if recompute_attention else kept | ATTENTION_OPERATORS,
            base_folder=base_folder,
        )
        return
    every = 1 if settings.mode == "full" else int(settings.selective_ac_option)
    layers = model.get_submodule("layers")
    for layer_id, block in layers.named_children():
        if (int(layer_id) + 1) % every == 0:
            wrapped = checkpoint_wrapper(
                block,
                **_contexts(recompute_attention, offload),
                preserve_rng_state=settings.preserve_rng_state,
                determinism_check=settings.determinism_check,
                early_stop=settings.early_stop,
                debug=settings.debug,
            )
            layers.register_module(layer_id, wrapped)
    logger.info(
        f"Activation checkpointing: one block in {every}, attention "
        f"{'computed again' if recompute_attention else 'kept'}, "
        f"{'offloaded to the host' if offload else 'on the device'}"
    )


def _contexts(recompute_attention: bool, offload: CheckpointOffload | None) -> dict[str, Any]:
    """What torch's checkpoint runs the forward pass and the recomputation in.

    Nothing at all where everything is computed again: torch.compile (2.13) cannot trace torch's own
    `noop_context_fn`.
    """
    if recompute_attention:
        return {}
    if offload is None:
        return {"context_fn": lambda: create_selective_checkpoint_contexts(_keep_attention)}

    def offloading_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
        kept: list = []
        return _StoreAttention(kept, offload), _FetchAttention(kept, offload)

    return {"context_fn": offloading_contexts}


def _keep_attention(ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    if operator in ATTENTION_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


class _StoreAttention(TorchDispatchMode):
    """Forward: results of attention operators go to the host.

    The same as torch's selective checkpointing, which has no way to a host outside of
    torch.compile (torch 2.13).
    """

    def __init__(self, kept: list, offload: CheckpointOffload):
        super().__init__()
        self.kept, self.offload = kept, offload

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in ATTENTION_OPERATORS:
            stored = list(out)
            # The output last: a store waits for the copy of the one before it.
            for i in sorted(range(len(out)), key=lambda i: getattr(out[i], "nbytes", 0)):
                if isinstance(out[i], torch.Tensor):
                    stored[i] = self.offload.store(out[i])
            self.kept.append(stored)
        return out


class _FetchAttention(TorchDispatchMode):
    """Recomputation: the results come back in the order in which they were stored."""

    def __init__(self, kept: list, offload: CheckpointOffload):
        super().__init__()
        self.kept, self.offload = kept, offload

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in ATTENTION_OPERATORS:
            return tuple(
                self.offload.fetch(x) if isinstance(x, HostTensor) else x for x in self.kept.pop(0)
            )
        return func(*args, **(kwargs or {}))
