"""Tiny Hugging Face models on the ring, against one rank that sees every document alone."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from striped_cp import unshard_sequence
from striped_cp.hf import checkpoint_keeping_attention, chunked_loss, enable, shard_batch

VOCABULARY, LAYERS, SEQ_LEN = 131, 3, 96
DOCUMENTS = [[0, 40, 41, 96], [0, 96]]  # one of a single token

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
CONFIGS: dict[str, Any] = {
    "llama": lambda: tf.LlamaConfig(**_SIZES),
    "qwen2": lambda: tf.Qwen2Config(**_SIZES),
    "qwen3": lambda: tf.Qwen3Config(**_SIZES, head_dim=16, tie_word_embeddings=True),
    "olmo2": lambda: tf.Olmo2Config(**_SIZES),
    "smollm3": lambda: tf.SmolLM3Config(**_SIZES, no_rope_layer_interval=2, pad_token_id=0),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(**_SIZES, **_EXPERTS, head_dim=16),
    "mixtral": lambda: tf.MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "mistral": lambda: tf.MistralConfig(**_SIZES, sliding_window=9),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **_SIZES, head_dim=16, sliding_window=9, layer_types=_ALTERNATING
    ),
    "gpt_oss": lambda: tf.GptOssConfig(
        **_SIZES,
        head_dim=16,
        sliding_window=9,
        layer_types=_ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    # Its layers are not told of their window, but for the mask.
    "qwen2_moe": lambda: tf.Qwen2MoeConfig(
        **_SIZES,
        **_EXPERTS,
        shared_expert_intermediate_size=48,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=1,
    ),
}


def make_model(name: str) -> tf.PreTrainedModel:
    torch.manual_seed(0)
    alone = "eager" if name == "gpt_oss" else "sdpa"  # which has no sinks
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=alone)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.normal_()
    return model.float().train()


def make_batch() -> tuple[Tensor, Tensor]:
    """input_ids and labels, the first five of which are no targets."""
    ids = torch.randint(0, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :5] = -100
    return ids, labels


def one_rank(model: nn.Module, ids: Tensor, labels: Tensor, cu_seqlens: Any) -> Tensor:
    """Loss of the batch, every document alone; backward has run."""
    pieces = [
        (row, start, end)
        for row, borders in enumerate(cu_seqlens or [[0, SEQ_LEN]] * len(ids))
        for start, end in itertools.pairwise(borders)
        if end - start > 1
    ]
    targets = sum((labels[row, start + 1 : end] != -100).sum() for row, start, end in pieces)
    total = torch.zeros(())
    for row, start, end in pieces:
        here = slice(row, row + 1), slice(start, end)
        out = model(
            input_ids=ids[here], labels=labels[here], num_items_in_batch=targets, use_cache=False
        )
        out.loss.backward()
        total += out.loss.detach()
    return total


class RingCalls(TorchDispatchMode):
    """Counts the runs of the ring's forward operator, those of a recomputation included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.striped_cp.ring_attention.default
        return func(*args, **(kwargs or {}))


def prepare(model: tf.PreTrainedModel, mode: str, mesh: Any) -> None:
    """Of an enabled model: "plain", "checkpointed", "selective", "fsdp2", "compiled".

    Also "chunked" and "fsdp2 chunked", which is about the loss, and "shared heads", about the mesh.
    """
    if mode == "checkpointed":
        model.gradient_checkpointing_enable()
    elif mode == "selective":
        checkpoint_keeping_attention(model)
    elif mode == "compiled":
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
    elif "fsdp2" in mode:
        units = [*model.model.layers, model]
        for unit in units:
            fully_shard(unit, mesh=mesh)
        for unit in units:  # sums of shares; gloo has no scaled sum
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)


def compare(name: str, packed: bool, mode: str) -> dict[str, float]:
    """Relative errors of loss and gradients, and the number of ring calls on this rank."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    if mode == "shared heads":
        mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("cp", "ulysses"))
    model = make_model(name)
    reference = copy.deepcopy(model)
    ids, labels = make_batch()
    cu_seqlens = DOCUMENTS if packed else None
    loss_reference = one_rank(reference, ids, labels, cu_seqlens)

    enable(model, mesh)
    prepare(model, mode, mesh)
    calls = RingCalls()
    with contextlib.nullcontext() if mode == "compiled" else calls:  # it cannot watch compiled code
        batch = shard_batch(ids, labels, mesh, cu_seqlens)
        loss = chunked_loss(model, batch, 7) if "chunked" in mode else model(**batch).loss
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for (parameter, x), y in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert x.grad is not None, parameter
        if "fsdp2" in mode:
            grad = x.grad.full_tensor()
        else:
            grad = x.grad.clone()
            dist.all_reduce(grad)
        worst = max(worst, ((grad - y.grad).norm() / y.grad.norm().clamp_min(1e-12)).item())
    return {
        "loss": abs(total / loss_reference - 1).item(),
        "gradients": worst,
        "calls": calls.count,
    }


def leaks(name: str) -> dict[str, Any]:
    """Change a token: which documents' logits change, bitwise, and which are the same?"""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = enable(make_model(name), mesh)
    ids, _ = make_batch()
    other = ids.clone()
    other[0, 10] = (other[0, 10] + 1) % VOCABULARY  # in the first document of the first row

    def logits(ids: Tensor) -> Tensor:
        with torch.no_grad():
            local = model(**shard_batch(ids, None, mesh, DOCUMENTS)).logits
        return unshard_sequence(local.contiguous(), mesh=mesh, dim=1)

    changed = (logits(ids) != logits(other)).any(-1)
    return {
        "before": changed[0, :10].any().item(),
        "after": changed[0, 10:40].all().item(),
        "other documents": changed[0, 40:].any().item(),
        "other rows": changed[1:].any().item(),
    }


def half_precision(name: str) -> dict[str, float]:
    """Losses in float32 and bfloat16 on one rank, and in the latter on the ring."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    ids, labels = make_batch()
    exact = one_rank(make_model(name), ids, labels, DOCUMENTS)
    alone = one_rank(make_model(name).bfloat16(), ids, labels, DOCUMENTS)
    model = enable(make_model(name).bfloat16(), mesh)
    loss = model(**shard_batch(ids, labels, mesh, DOCUMENTS)).loss
    loss.backward()
    dist.all_reduce(total := loss.detach().clone())
    model = enable(make_model(name), mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**shard_batch(ids, labels, mesh, DOCUMENTS)).loss
    loss.backward()
    dist.all_reduce(mixed := loss.detach().clone())
    return {
        "exact": exact.item(),
        "one rank": alone.item(),
        "ring": total.item(),
        "ring under autocast": mixed.item(),
    }


def different_batches() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = enable(make_model("llama"), mesh)
    ids, labels = make_batch()
    ids[0, 0] = dist.get_rank()
    try:
        model(**shard_batch(ids, labels, mesh))
    except ValueError as error:
        return str(error)
    return ""


def compare_all(cases: list[tuple[str, bool, str]]) -> list[dict[str, float]]:
    return [compare(*case) for case in cases]
