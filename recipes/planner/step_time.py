"""Time of one optimizer step, part by part, in seconds.

Every kernel runs at the rate of its source in `hardware.py`; communication is counted only where it
outlasts the computation that hides it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import NamedTuple

from recipes.planner.footprint import LOSS_BYTES_PER_LOGIT, offloaded_bytes, rank_parameters
from recipes.planner.hardware import Gpu, KernelRate
from recipes.planner.run import Run

# Share of the best measured matrix product that the linear layers of a training step reach. Fitted
# on the compiled 8B run at 8K of torchtitan's benchmark, see published.py.
LINEAR_SHARE = 0.86
# Speed of the same layers with Float8, from the Float8 row of the same table.
FLOAT8_SPEEDUP = 1.5
# Share of peak memory bandwidth that element-wise kernels reach. Assumed.
HBM_SHARE = 0.85
# Rows of one kernel block: a causal kernel computes the whole blocks on its diagonal.
KERNEL_BLOCK = 128
_BF16 = 2
_FP32 = 4


@dataclass(frozen=True)
class Hop:
    """One step of the ring: what travels, and the smallest tile that has to hide it.

    Attributes:
        bytes: K and V of one rank and layer (backward: and their float32 gradients).
        seconds: time on the slowest link of the ring.
        tile_seconds: kernel time of the slowest rank's tile, in the shortest step.
        hides_from_local_tokens: S / P from which the tile outlasts the hop; None where some step
            has nothing to compute (layouts that packed documents leave idle), and with a window.
    """

    bytes: float
    seconds: float
    tile_seconds: float
    hides_from_local_tokens: float | None

    @property
    def hidden(self) -> bool:
        return self.tile_seconds >= self.seconds


@dataclass(frozen=True)
class TimePlan:
    """Seconds of one optimizer step, and the rates that follow.

    Attributes:
        hops: "forward" and "backward"; empty without a ring.
    """

    parts: dict[str, float]
    tokens_per_second_per_gpu: float
    mfu_causal: float
    mfu_torchtitan: float
    hops: dict[str, Hop]

    @property
    def step_seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def bound_by(self) -> str:
        """The part that takes longest."""
        return max(self.parts, key=lambda name: self.parts[name])


def kv_hop_bytes(run: Run) -> int:
    """Bytes of K and V that one rank sends per forward hop and layer, bf16."""
    tokens = run.microbatch * run.local_tokens
    return _BF16 * 2 * tokens * run.ring_kv_dim // run.tp


def tile_pairs(run: Run, window: int | None = None) -> list[float]:
    """Visible pairs of the slowest rank, per ring step, of one sequence, in layers with a window.

    Ranks are in lock step, so the slowest one sets the time of a step. One document: closed forms.
    Packed documents and windows: `slowest_pairs`, which `balance.py` counts from the tiles.
    """
    n = run.ring_tokens
    if run.slowest_pairs:
        return list(run.slowest_pairs[window])
    assert window is None, "windows are counted first"
    if run.layout == "contiguous":
        return [n * (n + 1) / 2] + [float(n * n)] * (run.ring - 1)
    return [n * (n + 1) / 2] * run.ring


def attention_seconds(
    run: Run, rate: KernelRate, window: int | None = None
) -> tuple[list[float], list[float]]:
    """Kernel seconds per ring step of one layer and microbatch, forward and backward.

    A window has an edge on either side, in its few keys per row.
    """
    forward, backward = [], []
    forward_rate, backward_rate = rate.of(bool(run.documents), run.ring_tokens)
    ranks_of_heads = run.tp * run.ulysses
    tiles = tile_pairs(run, window)
    width = run.ring_tokens if window is None else tiles[0] / run.ring_tokens
    for pairs in tiles:
        diagonal = 1 + KERNEL_BLOCK / width
        flops = run.shape.attention_forward_flops(pairs) * diagonal
        flops *= run.microbatch / ranks_of_heads
        forward.append(flops / (forward_rate * 1e12))
        backward.append(2.5 * flops / (backward_rate * 1e12))
    return forward, backward


def merge_seconds(run: Run, gpu: Gpu, steps: int) -> tuple[float, float]:
    """Seconds of the element-wise work between so many tiles, per layer and microbatch.

    Forward: the float32 output is read and written, the tile's bf16 output read. Backward: the same
    for dQ, and for dK and dV.
    """
    if run.ring == 1:
        return 0.0, 0.0
    tokens = run.microbatch * run.local_tokens
    query, kv = run.shape.query_dim / run.tp, 2 * run.ring_kv_dim / run.tp
    per_step = (2 * _FP32 + _BF16) * tokens / (gpu.hbm_gb_s * 1e9 * HBM_SHARE)
    return steps * query * per_step, steps * (query + kv) * per_step


def exchange_seconds(run: Run, gpu: Gpu, network_gb_s: float) -> tuple[float, float]:
    """Seconds per layer and microbatch in which ranks trade sequence for heads and back.

    Nothing hides them. Forward: q, k, v there and the output back. Backward: q, k, v, the output
    and its gradient there, dq, dk and dv back. Each is packed and unpacked.
    """
    if run.ulysses == 1:
        return 0.0, 0.0
    tokens = run.microbatch * run.local_tokens
    query, kv = run.shape.query_dim / run.tp, 2 * run.ring_kv_dim / run.tp
    link = group_bytes_per_second(run.ulysses, run.tp, gpu, network_gb_s)
    travels = (run.ulysses - 1) / run.ulysses / link
    copied = 4 / (gpu.hbm_gb_s * 1e9 * HBM_SHARE)
    once = _BF16 * tokens * (travels + copied)
    return once * (2 * query + kv), once * (4 * query + 2 * kv)


def ring_hop(
    run: Run,
    gpu: Gpu,
    network_gb_s: float,
    tiles: list[float],
    backward: bool,
    window: int | None = None,
) -> Hop:
    """The ring's hop against its tile; `tiles` are the kernel seconds per step."""
    # Backward: K and V in bf16 and dK, dV in float32.
    size = kv_hop_bytes(run) * (3 if backward else 1)
    # The slowest link between neighbours; tensor-parallel ranks lie inside cp on the mesh.
    link_gb_s = gpu.p2p_gb_s if run.cp * run.tp <= gpu.gpus_per_node else network_gb_s
    seconds = size / (1e9 * link_gb_s)
    tile = min(tiles)
    # The hop grows with S/P, the tile with its square, but for a window.
    grows = tile > 0 and window is None
    return Hop(size, seconds, tile, run.local_tokens * seconds / tile if grows else None)


def exposed_ring_seconds(run: Run, hop: Hop, tiles: list[float], backward: bool) -> float:
    """Seconds per layer and microbatch in which ranks wait for keys and values.

    Ring: every hop travels beside one tile; P - 1 hops forward, and one more backward, that brings
    dK and dV home; fewer where a window ends the ring earlier. All-gather: the first tile is local
    and hides its share of P - 1 hops.
    """
    if len(tiles) == 1:
        return 0.0
    if run.rotate_method == "allgather":
        return max(0.0, (run.ring - 1) * hop.seconds - tiles[0])
    hiding = tiles if backward else tiles[:-1]
    return sum(max(0.0, hop.seconds - tile) for tile in hiding)


def group_bytes_per_second(size: int, stride: int, gpu: Gpu, network_gb_s: float) -> float:
    """Rate per GPU of an all-gather over `size` ranks that lie `stride` apart.

    Across nodes every member inside a node brings its own NIC.
    """
    if size * stride <= gpu.gpus_per_node:
        return 1e9 * gpu.collective_gb_s
    members_per_node = max(1, gpu.gpus_per_node // stride)
    return 1e9 * min(gpu.collective_gb_s, network_gb_s * members_per_node)


class RingTime(NamedTuple):
    """Attention of one layer and microbatch in seconds: kernels, merging, waiting for keys."""

    forward: float
    backward: float
    merge_forward: float
    merge_backward: float
    exposed_forward: float
    exposed_backward: float


def ring_time(
    run: Run, gpu: Gpu, network_gb_s: float, window: int | None
) -> tuple[RingTime, tuple[Hop, Hop]]:
    """Attention of a layer with such a window, and its hops forward and backward."""
    forward, backward = attention_seconds(run, gpu.kernels[run.kernel], window)
    there = ring_hop(run, gpu, network_gb_s, forward, False, window)
    back = ring_hop(run, gpu, network_gb_s, backward, True, window)
    seconds = RingTime(
        sum(forward),
        sum(backward),
        *merge_seconds(run, gpu, len(forward)),
        exposed_ring_seconds(run, there, forward, backward=False),
        exposed_ring_seconds(run, back, backward, backward=True),
    )
    return seconds, (there, back)


def recomputed_shares(run: Run) -> tuple[float, float]:
    """Shares of a layer's linear and element-wise forward work that the backward pass repeats."""
    shape = run.shape
    linear = elementwise = run.levers.whole_blocks
    if run.levers.checkpointing == "selective":
        # wk, wo and w3 are repeated, every second product kept.
        repeated = shape.dim * (shape.kv_dim + shape.query_dim + shape.ffn_dim)
        linear = repeated / shape.matrix_parameters
        elementwise = 1.0
    if run.levers.mlp_chunk_tokens:
        # Every chunk is recomputed once more while it runs backward.
        linear += shape.mlp_matrix_parameters / shape.matrix_parameters
    return linear, elementwise


def layer_seconds(run: Run, gpu: Gpu) -> tuple[float, float]:
    """Linear and element-wise forward work of one layer and microbatch on one GPU."""
    shape = run.shape
    tokens = run.microbatch * run.local_tokens / run.tp
    rate = 1e12 * gpu.matmul_tflops * LINEAR_SHARE * (FLOAT8_SPEEDUP if run.float8 else 1)
    linear = 2 * shape.matrix_parameters * tokens / rate
    # bf16 elements read and written per token: two norms, two residual additions; SiLU, product
    # (fused when compiled); rotation of q and k, in float32 when not compiled.
    moved = _BF16 * (2 * 2 + 2 * 3) * shape.dim
    moved += _BF16 * (3 if run.compiled else 5) * shape.ffn_dim
    moved += (2 * _BF16 if run.compiled else 20) * (shape.query_dim + shape.kv_dim)
    return linear, moved * tokens / (gpu.hbm_gb_s * 1e9 * HBM_SHARE)


def fsdp_seconds(run: Run, gpu: Gpu, network_gb_s: float) -> tuple[float, float, float]:
    """All-gather and reduce-scatter of one layer, both of the two vocabulary matrices.

    HSDP adds an all-reduce across the replicas to the reduce-scatter.
    """
    degree = run.fsdp_degree
    if degree == 1 and run.dp_replicate == 1:
        return 0.0, 0.0, 0.0
    rate = group_bytes_per_second(degree, run.tp, gpu, network_gb_s)
    layer = run.shape.layer_parameters / run.tp
    gather = _BF16 * layer * (degree - 1) / degree / rate
    scatter = _FP32 * layer * (degree - 1) / degree / rate
    if run.dp_replicate > 1:
        across = group_bytes_per_second(run.dp_replicate, run.tp * degree, gpu, network_gb_s)
        share = (run.dp_replicate - 1) / run.dp_replicate
        scatter += 2 * _FP32 * layer / degree * share / across
    vocabulary = 2 * (gather + scatter) * run.shape.embedding_parameters / (layer * run.tp)
    return gather, scatter, vocabulary


def tp_seconds(run: Run, gpu: Gpu) -> float:
    """Sequence-parallel collectives of one layer, one way: two all-gathers, two reduce-scatters."""
    if run.tp == 1:
        return 0.0
    tokens = run.microbatch * run.local_tokens
    size = _BF16 * tokens * run.shape.dim * (run.tp - 1) / run.tp
    return 4 * size / (gpu.collective_gb_s * 1e9)


def bubble_share(run: Run) -> float:
    """Idle time of the pipeline over its busy time: (p - 1) / (m v), arXiv 2104.04473.

    With fewer microbatches than ranks each of the other v - 1 stages of a rank waits for the first
    microbatch to come round.
    """
    if run.pp == 1:
        return 0.0
    waits = (run.virtual_stages - 1) * max(0, run.pp - run.microbatches)
    return (run.pp - 1 + waits) / (run.microbatches * run.virtual_stages)


def loss_seconds(run: Run, gpu: Gpu) -> tuple[float, float]:
    """Output projection, and element-wise work of the loss, of one microbatch.

    Both are spread over the pipeline stages, as torchtitan gives the last stage fewer layers.
    """
    tokens = run.microbatch * run.local_tokens
    flops = 6 * run.shape.embedding_parameters * tokens / run.tp
    # The logits keep bf16 in Float8 runs: torchtitan filters the output projection out.
    linear = flops / (1e12 * gpu.matmul_tflops * LINEAR_SHARE)
    # Read and write every copy of the logits once.
    moved = 2 * LOSS_BYTES_PER_LOGIT * tokens * run.shape.vocab_size / run.tp
    return linear / run.pp, moved / (gpu.hbm_gb_s * 1e9 * HBM_SHARE) / run.pp


def optimizer_seconds(run: Run, gpu: Gpu) -> float:
    """AdamW reads parameter, gradient and two moments, and writes all but the gradient."""
    sharded = rank_parameters(run) / run.fsdp_degree
    return 7 * run.parameter_bytes * sharded / (gpu.hbm_gb_s * 1e9 * HBM_SHARE)


def plan_time(run: Run, gpu: Gpu, network_gb_s: float) -> TimePlan:
    """Time of one optimizer step.

    Args:
        network_gb_s: usable GB/s per GPU between nodes (`find_network_gb_s`).
    """
    windows = run.shape.layers_by_window
    times, hops = zip(
        *(ring_time(run, gpu, network_gb_s, window) for window in windows), strict=True
    )
    ring = RingTime(
        *(
            sum(map(operator.mul, windows.values(), part)) / run.shape.n_layers
            for part in zip(*times, strict=True)
        )
    )
    exchange_forward, exchange_backward = exchange_seconds(run, gpu, network_gb_s)
    linear, elementwise = layer_seconds(run, gpu)
    linear_again, elementwise_again = recomputed_shares(run)
    repeats = ring_repeats(run)
    tp_exposed = tp_seconds(run, gpu) * (2 + linear_again)
    if run.async_tp:
        tp_exposed = max(0.0, tp_exposed - 3 * linear)
    attention = (1 + repeats) * ring.forward + ring.backward
    merging = (1 + repeats) * ring.merge_forward + ring.merge_backward
    repeated = linear_again * linear, elementwise_again * elementwise
    forward_work = ring.forward + ring.merge_forward + linear + elementwise
    total_work = attention + merging + 3 * linear + repeated[0] + 3 * elementwise + repeated[1]
    backward_work = total_work - forward_work

    passes = run.microbatches * run.gradient_accumulation
    per_step = passes * run.shape.n_layers / run.pp
    loss_linear, loss_elementwise = loss_seconds(run, gpu)
    parts = {
        "attention kernels": per_step * attention,
        "ring merging": per_step * merging,
        "linear layers": per_step * (3 * linear + repeated[0]),
        "element-wise": per_step * (3 * elementwise + repeated[1]),
        "loss": passes * (loss_linear + loss_elementwise),
        "exposed ring": per_step * ((1 + repeats) * ring.exposed_forward + ring.exposed_backward),
        "head exchange": per_step * ((1 + repeats) * exchange_forward + exchange_backward),
        "exposed FSDP": _fsdp_exposed(run, gpu, network_gb_s, forward_work, backward_work),
        "tensor parallel": per_step * tp_exposed,
        "exposed offload": per_step * _offload_exposed(run, gpu, forward_work, backward_work),
        "optimizer": optimizer_seconds(run, gpu),
    }
    # Everything but the optimizer and the once-per-step FSDP traffic waits in the bubble.
    busy = sum(parts.values()) - parts["optimizer"] - (parts["exposed FSDP"] if run.pp > 1 else 0)
    parts["pipeline bubble"] = bubble_share(run) * busy
    tightest = min(hops, key=lambda pair: pair[0].tile_seconds) if run.ring > 1 else ()
    return _rates(run, gpu, parts, dict(zip(("forward", "backward"), tightest, strict=False)))


def ring_repeats(run: Run) -> float:
    """How often the backward pass repeats the attention forward."""
    levers = run.levers
    if not levers.recompute_attention:
        return 0.0
    return 1.0 if levers.checkpointing == "selective" else levers.whole_blocks


def _fsdp_exposed(
    run: Run, gpu: Gpu, network_gb_s: float, forward_work: float, backward_work: float
) -> float:
    """Seconds per step in which FSDP's collectives outlast the layer that hides them."""
    gather, scatter, vocabulary = fsdp_seconds(run, gpu, network_gb_s)
    layers = run.shape.n_layers / run.pp
    # The first layer's gather, the last one's reduce-scatter and those of the vocabulary matrices
    # have nothing to hide behind.
    edges = gather + scatter + vocabulary
    if run.pp > 1:
        return layers * (gather + scatter) + edges  # once per step, around the schedule
    per_layer = max(0.0, gather - forward_work) + max(0.0, gather + scatter - backward_work)
    return run.gradient_accumulation * (layers * per_layer + edges)


def _offload_exposed(run: Run, gpu: Gpu, forward_work: float, backward_work: float) -> float:
    """Seconds per layer in which copies of the checkpoints outlast the layer that hides them."""
    copy = offloaded_bytes(run) / (gpu.host_gb_s * 1e9)
    return max(0.0, copy - forward_work) + max(0.0, copy - backward_work)


def _rates(run: Run, gpu: Gpu, parts: dict[str, float], hops: dict[str, Hop]) -> TimePlan:
    seconds = sum(parts.values())
    tokens = run.tokens_per_step / run.gpus
    flops = run.shape.training_flops_per_token
    achieved = tokens / seconds / (gpu.peak_tflops * 1e12)
    return TimePlan(
        parts,
        tokens / seconds,
        flops(run.pairs / run.seq_len) * achieved,
        flops(run.seq_len) * achieved,
        hops,
    )
