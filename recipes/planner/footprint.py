"""Memory of one GPU, part by part, at the three moments at which a training step can peak.

    loss       the logits exist, every layer's checkpoint waits
    MLP        a layer is recomputed and its MLP runs backward
    attention  the same layer's attention runs backward, with the buffers of the ring

The parts that live through the step (states, gathered parameters, checkpoints, ...) are added to
the largest of the three. All functions return bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from recipes.planner.run import Run

GIB = 2**30

# CUDA context, cuBLAS workspaces and NCCL buffers, outside of torch's allocator. Assumed; the
# published runs that the planner is checked against count torch's reserved memory only.
FRAMEWORK_BYTES = 2.5 * GIB
# Reserved over allocated memory of the activations (fragmentation of torch's caching allocator).
# Fitted on the 8B run at 8K of torchtitan's benchmark, see published.py.
ALLOCATOR_SLACK = 0.05
# Logits in bf16, their float32 copy, its gradient and the bf16 gradient: 2 + 4 + 4 + 2 bytes, as
# torchtitan's cross_entropy_loss (0.2.2, components/loss.py) makes them. The chunked loss of
# recipes/memory/loss.py turns the float32 copy into its gradient in place.
LOSS_BYTES_PER_LOGIT = 12
CHUNKED_LOSS_BYTES_PER_LOGIT = 8
_BF16 = 2
_FP32 = 4


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one GPU.

    Attributes:
        parts: bytes by part, in the order of the report.
        moment: where the step peaks: "loss", "MLP backward" or "attention backward".
        at_peak: the parts alive at that moment; their sum is the total.
        host: pinned host memory that offloaded checkpoints take, per GPU.
    """

    parts: dict[str, float]
    moment: str
    at_peak: frozenset[str]
    host: float

    @property
    def total(self) -> float:
        """Bytes of GPU memory in use at the peak."""
        return sum(self.parts[name] for name in self.at_peak)

    @property
    def reserved(self) -> float:
        """What torchtitan prints as memory: reserved by torch, without CUDA context and NCCL."""
        return self.total - self.parts["framework"]


def rank_parameters(run: Run) -> float:
    """Parameters of the fullest pipeline rank, one tensor-parallel slice of them, unsharded."""
    shape = run.shape
    if run.pp == 1:
        return shape.parameters / run.tp
    return (run.layers_per_rank * shape.layer_parameters + shape.embedding_parameters) / run.tp


def state_bytes(run: Run) -> dict[str, float]:
    """Sharded parameters, gradients and the two moments of Adam."""
    sharded = rank_parameters(run) / run.fsdp_degree
    return {
        "parameters": run.parameter_bytes * sharded,
        "gradients": run.parameter_bytes * sharded,
        "optimizer": 2 * run.parameter_bytes * sharded,
    }


def gathered_bytes(run: Run) -> float:
    """Unsharded bf16 parameters and unsharded gradients under FSDP.

    Three layers exist at a time: the one at work, the one prefetched and the one being freed; their
    gradients in bf16 and as the float32 input of the reduce-scatter. The output projection stays
    unsharded from forward to backward. Pipeline parallelism keeps the whole stage unsharded and
    accumulates its gradients in float32 until the last microbatch.
    """
    shape = run.shape
    layer = shape.layer_parameters / run.tp
    output = shape.embedding_parameters / run.tp
    if run.fsdp_degree == 1:
        return 3 * _BF16 * layer
    if run.pp > 1:
        weights = _BF16 * (rank_parameters(run) if run.stays_gathered else 3 * layer)
        return weights + _FP32 * rank_parameters(run)
    weights = _BF16 * (rank_parameters(run) if run.stays_gathered else 3 * layer + output)
    return weights + (_BF16 + _FP32) * max(layer, output)


def in_flight_microbatches(run: Run) -> float:
    """Microbatches whose checkpoints the first pipeline rank holds at once."""
    if run.pp == 1:
        return 1
    if run.pp_schedule in ("GPipe", "LoopedBFS"):
        return run.microbatches
    if run.virtual_stages == 1:
        return min(run.pp, run.microbatches)
    # Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2): warm-up chunks of the
    # first rank, each 1/v of its layers, in rounds of pp microbatches or some more.
    per_round = run.microbatches // max(1, run.microbatches // run.pp)
    chunks = (run.virtual_stages - 1) * per_round + 2 * (run.pp - 1) + 1
    return min(chunks / run.virtual_stages, run.microbatches)


def checkpoint_bytes(run: Run) -> float:
    """What one layer keeps on the GPU from forward to backward, for one microbatch."""
    shape, levers = run.shape, run.levers
    attention = 0 if levers.recompute_attention else shape.query_dim
    if levers.checkpointing == "selective":
        # Beside the block input, every second matrix product is kept: wq, wv, w1, w2. w2's output
        # is a partial sum over tensor-parallel ranks, as wide as the model.
        products = shape.query_dim + shape.kv_dim + shape.ffn_dim + shape.dim * run.tp
        width = float(shape.dim + products + attention)
    else:
        whole = 0 if levers.offload_checkpoints else shape.dim + attention
        none = 4 * shape.dim + 2 * shape.query_dim + 2 * shape.kv_dim
        none += 0 if levers.mlp_chunk_tokens else 4 * shape.ffn_dim
        width = levers.whole_blocks * whole + (1 - levers.whole_blocks) * none
    return _BF16 * width * run.microbatch * run.local_tokens / run.tp


def offloaded_bytes(run: Run) -> float:
    """What one checkpointed layer sends to host memory, for one microbatch."""
    return sum(_offloaded_tensors(run))


def pinned_bytes(run: Run) -> int:
    """Host memory that `offloaded_bytes` takes.

    torch 2.13 rounds every pinned block up to a power of two (ATen/core/CachingHostAllocator.h).
    """
    return sum(1 << (math.ceil(size) - 1).bit_length() for size in _offloaded_tensors(run))


def _offloaded_tensors(run: Run) -> list[float]:
    """Bytes of a layer's input and, unless it is computed again, of its attention output."""
    shape, levers = run.shape, run.levers
    if not levers.offload_checkpoints:
        return []
    widths = [shape.dim] if levers.recompute_attention else [shape.dim, shape.query_dim]
    return [_BF16 * width * run.microbatch * run.local_tokens / run.tp for width in widths]


def layer_bytes(run: Run) -> dict[str, float]:
    """Activations of the one layer that runs backward, by moment, beyond its checkpoint.

    For full checkpointing of 8B the MLP moment holds 28 tensors of the size of the block input,
    which is what stas00/ml-engineering measured for Llama-3.1-8B.
    """
    shape, levers = run.shape, run.levers
    tokens = run.microbatch * run.local_tokens
    # Sequence parallelism splits the residual stream; the inputs of the projections are gathered.
    residual, gathered = shape.dim / run.tp, shape.dim
    query, kv, ffn = shape.query_dim / run.tp, shape.kv_dim / run.tp, shape.ffn_dim / run.tp
    recomputed = levers.checkpointing != "none"
    chunk = min(levers.mlp_chunk_tokens or tokens, tokens) / tokens
    attention = (gathered + query + 2 * kv) if recomputed else 0
    if recomputed and levers.recompute_attention:
        attention += query  # the output, which is a checkpoint otherwise
    # The MLP's input and residual, w1, silu, w3 and their product; two gradients as wide at the
    # peak. A chunk makes its own again.
    mlp = (residual + gathered if recomputed else 0) + residual + 2 * ffn * chunk
    if recomputed or chunk < 1:
        mlp += 4 * ffn * chunk
    if chunk < 1:
        mlp += residual
    # Of this layer, and of the one whose copies are on their way back.
    arriving = 2 * offloaded_bytes(run)
    # Gradients of the block output, of the attention output, and of q, k, v; with a ring dQ is
    # summed in float32, and a tile's gradients exist beside the sums.
    gradients = residual + 2 * query + 2 * kv
    if run.ring > 1:
        gradients += 3 * query + 2 * kv
    return {
        "MLP backward": _BF16 * tokens * (attention + mlp) + arriving,
        "attention backward": _BF16 * tokens * (attention + gradients)
        + arriving
        + exchange_bytes(run)
        + shared_heads_bytes(run)
        + kernel_bytes(run),
    }


def kernel_bytes(run: Run) -> float:
    """Workspace of FlashAttention's backward call.

    dQ in float32, with documents up to twice the rows (striped_cp/kernels/varlen.py); with
    grouped-query attention dK and dV of every query head (torch 2.13, mha_varlen_bwd).
    Deterministic, dQ once for every share of the GPU that a head of a sequence, or of one of its
    documents, is given. Others publish none.
    """
    if run.kernel in ("cudnn", "flex"):
        return 0.0
    tokens = run.microbatch * run.local_tokens
    query = tokens * run.shape.query_dim / run.tp
    heads = run.shape.n_heads // (run.tp * run.ulysses)
    heads *= max(1, len(run.documents)) * run.microbatch
    copies = max(1, math.ceil(run.deterministic_on / heads))
    grouped = 2 * _BF16 * query if run.shape.n_kv_heads < run.shape.n_heads else 0.0
    return _FP32 * query * copies * (2 if run.documents else 1) + grouped


def ring_bytes(run: Run) -> float:
    """Receive buffers of the ring, reused by every layer and kept through the step.

    Keys and values in bf16, twice from three ranks on, and their gradients in float32. All-gather
    has none.
    """
    if run.ring == 1 or run.rotate_method == "allgather":
        return 0.0
    return _local_kv(run) * (min(run.ring - 1, 2) * _BF16 + _FP32)


def exchange_bytes(run: Run) -> float:
    """What one layer's attention needs beside `ring_bytes` for keys and values of other ranks.

    Ring: the float32 gradients at hand. All-gather: keys and values of the whole sequence in bf16
    and their gradients in float32, of which keys' and values' in turn are there twice.
    """
    if run.ring == 1:
        return 0.0
    if run.rotate_method == "allgather":
        return run.ring * _local_kv(run) * (_BF16 + 1.5 * _FP32)
    return _local_kv(run) * _FP32


def shared_heads_bytes(run: Run) -> float:
    """Of one layer's backward pass: q, k, v, out and its gradient with all tokens of a tile."""
    if run.ulysses == 1:
        return 0.0
    query = run.microbatch * run.local_tokens * run.shape.query_dim / run.tp
    return _BF16 * (3 * query + _local_kv(run))


def _local_kv(run: Run) -> float:
    """Elements of this rank's keys and values in one layer."""
    return 2 * run.microbatch * run.local_tokens * run.ring_kv_dim / run.tp


def loss_bytes(run: Run) -> float:
    """Logits, their copies and gradients, and the gradient of the hidden state.

    The chunked loss also sums the output projection's gradient in float32.
    """
    tokens = run.microbatch * run.local_tokens
    split = run.tp if run.loss_parallel else 1
    hidden = _BF16 * tokens * run.shape.dim / run.tp
    chunk = min(run.levers.loss_chunk_tokens, tokens)
    if not chunk:
        return LOSS_BYTES_PER_LOGIT * tokens * run.shape.vocab_size / split + hidden
    weight_gradient = _FP32 * run.shape.embedding_parameters / run.tp
    logits = CHUNKED_LOSS_BYTES_PER_LOGIT * chunk * run.shape.vocab_size / run.tp
    return logits + hidden + weight_gradient


def rope_bytes(run: Run) -> float:
    """Rotations of this rank's positions: complex64, head_dim / 2 per token."""
    return 8 * run.shape.head_dim / 2 * run.local_tokens


def plan_memory(run: Run) -> MemoryPlan:
    """Memory of the fullest GPU."""
    layer = layer_bytes(run)
    ring = ring_bytes(run)
    moments = {moment: {"layer peak": size} for moment, size in layer.items()}
    layers_in_flight = in_flight_microbatches(run) * run.layers_per_rank
    checkpoints = layers_in_flight * checkpoint_bytes(run)
    loss = loss_bytes(run)
    last_stage = 0.0
    if run.pp == 1:
        moments["loss"] = {"loss": loss}
    else:
        # The last rank has the loss and one microbatch in flight; the first has them all.
        last_stage = loss + run.layers_per_rank * checkpoint_bytes(run)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    alive = moments[moment]
    if last_stage > checkpoints + sum(alive.values()):
        moment, alive = "loss", {"loss": loss}
        checkpoints = last_stage - loss
    parts = {
        **state_bytes(run),
        "gathered layers": gathered_bytes(run),
        "checkpoints": checkpoints,
        "layer peak": alive.get("layer peak", max(layer.values())),
        "ring buffers": ring,
        "loss": loss,
        "RoPE": rope_bytes(run),
        "allocator slack": ALLOCATOR_SLACK * (checkpoints + ring + sum(alive.values())),
        "framework": FRAMEWORK_BYTES,
    }
    idle = {"layer peak", "loss"} - set(alive)
    host = layers_in_flight * pinned_bytes(run)
    return MemoryPlan(parts, moment, frozenset(set(parts) - idle), host)
