"""The planner's model: exact counts, what every lever changes, and when a hop hides."""

import re
from dataclasses import replace

import pytest
import torch

from recipes.models.llama3 import LLAMA3
from recipes.models.shapes import ModelShape
from recipes.planner.balance import with_counted_pairs
from recipes.planner.footprint import (
    GIB,
    checkpoint_bytes,
    exchange_bytes,
    gathered_bytes,
    in_flight_microbatches,
    kernel_bytes,
    layer_bytes,
    loss_bytes,
    offloaded_bytes,
    plan_memory,
    ring_bytes,
    rope_bytes,
    shared_heads_bytes,
    state_bytes,
)
from recipes.planner.hardware import GPUS, find_gpu, find_network_gb_s, gpu_from_device_name
from recipes.planner.plan import make_plan
from recipes.planner.report import exposed_ring_text
from recipes.planner.run import Levers, Run, check
from recipes.planner.step_time import (
    bubble_share,
    exchange_seconds,
    kv_hop_bytes,
    plan_time,
    tile_pairs,
)

H100 = GPUS["h100"]
IB = find_network_gb_s("ib400")
# 8B at 1M on 8 GPUs: 131,072 tokens a rank.
RUN_1M = Run(LLAMA3.flavors["8B"], 2**20, cp=8, levers=Levers(offload_checkpoints=True))


def lever(**changes) -> Run:
    return replace(RUN_1M, levers=replace(RUN_1M.levers, **changes))


def test_flops_per_token_in_both_conventions():
    # 8B at 1M: 8.697e11 causal, 1.694e12 with the full square.
    time = plan_time(RUN_1M, H100, IB)
    rate = time.tokens_per_second_per_gpu
    assert time.mfu_causal * 989e12 / rate == pytest.approx(8.697e11, rel=1e-3)
    assert time.mfu_torchtitan * 989e12 / rate == pytest.approx(1.694e12, rel=1e-3)


def test_hop_of_the_exercise():
    # N = 128K, P = 8, 8 key/value heads of 128, bf16: K and V of 16,384 tokens.
    run = Run(LLAMA3.flavors["8B"], 131072, cp=8)
    assert kv_hop_bytes(run) == 67_108_864
    time = plan_time(run, H100, IB)
    assert time.hops["forward"].bytes == 67_108_864
    assert time.hops["backward"].bytes == 3 * 67_108_864  # and dK, dV in float32


def test_states_of_8b_on_8_gpus():
    states = state_bytes(RUN_1M)
    assert sum(states.values()) == 16 * 8_030_261_248 / 8
    assert sum(state_bytes(replace(RUN_1M, parameter_bytes=2)).values()) == 8_030_261_248
    split = replace(RUN_1M, tp=2, cp=4)
    assert sum(state_bytes(split).values()) == 16 * 8_030_261_248 / 8


def test_checkpoints():
    tokens, dim = 131072, 4096
    on_device = lever(offload_checkpoints=False)
    # Full: block input (1 GiB) and attention output (1 GiB) of every layer.
    assert checkpoint_bytes(on_device) == 2 * 2 * tokens * dim
    assert checkpoint_bytes(lever(offload_checkpoints=False, recompute_attention=True)) == (
        2 * tokens * dim
    )
    assert checkpoint_bytes(RUN_1M) == 0
    assert plan_memory(RUN_1M).host == 32 * 4 * tokens * dim
    # 3B: 768 MiB each, of which torch makes pinned blocks of 1 GiB.
    small = replace(RUN_1M, shape=LLAMA3.flavors["3B"])
    assert offloaded_bytes(small) == 2 * 768 * 2**20
    assert plan_memory(small).host == 28 * 2 * 2**30
    # torchtitan's selective "op": 31,744 elements a token and layer of 8B.
    selective = lever(checkpointing="selective", offload_checkpoints=False)
    assert checkpoint_bytes(selective) == 2 * 31744 * tokens
    every_2 = lever(checkpointing="every_2", offload_checkpoints=False)
    none = lever(checkpointing="none", offload_checkpoints=False)
    assert checkpoint_bytes(every_2) == (checkpoint_bytes(on_device) + checkpoint_bytes(none)) / 2


def test_layer_peak_is_28_block_inputs():
    # stas00/ml-engineering measured 28 for Llama-3.1-8B, attention recomputed, checkpoint included.
    run = lever(recompute_attention=True, offload_checkpoints=False)
    block_input = 2 * 131072 * 4096
    copies = layer_bytes(run)["MLP backward"] / block_input
    assert 26 <= copies <= 29


def test_mlp_chunks_leave_attention_as_the_peak():
    whole = plan_memory(RUN_1M)
    chunked = plan_memory(lever(mlp_chunk_tokens=8192))
    assert whole.moment == "MLP backward"
    assert chunked.moment == "attention backward"
    assert whole.total - chunked.total > 8 * GIB
    # The chunks' MLP runs forward once more.
    time = plan_time(RUN_1M, H100, IB), plan_time(lever(mlp_chunk_tokens=8192), H100, IB)
    assert time[1].parts["linear layers"] > 1.1 * time[0].parts["linear layers"]


def test_loss_chunks():
    # Without chunks: 12 bytes a logit, 188 GiB for 131,072 tokens.
    assert loss_bytes(lever(loss_chunk_tokens=0)) == (12 * 128256 + 2 * 4096) * 131072
    chunked = loss_bytes(lever(loss_chunk_tokens=2048))
    weight_gradient = 4 * 128256 * 4096
    assert chunked == 8 * 2048 * 128256 + 2 * 131072 * 4096 + weight_gradient
    assert plan_memory(lever(loss_chunk_tokens=0)).moment == "loss"
    assert not make_plan(lever(loss_chunk_tokens=0), H100, IB).fits


def test_recomputing_attention_costs_a_forward():
    kept, again = plan_time(RUN_1M, H100, IB), plan_time(lever(recompute_attention=True), H100, IB)
    rate = H100.kernels["flash"]
    forward, backward = 1 / rate.forward, 2.5 / rate.backward
    ratio = again.parts["attention kernels"] / kept.parts["attention kernels"]
    assert ratio == pytest.approx((2 * forward + backward) / (forward + backward))


def test_offload_is_hidden_unless_the_host_is_slow():
    assert plan_time(RUN_1M, H100, IB).parts["exposed offload"] == 0
    # 2 GiB a layer, each way, at 1 GB/s: above the 0.8 s that a layer computes forward at 5 GB/s.
    slow = replace(H100, host_gb_s=1)
    parts = plan_time(RUN_1M, slow, IB).parts
    layers = (parts["attention kernels"] + parts["linear layers"]) / 32
    assert 2 * 2.147 * 32 - 32 * layers <= parts["exposed offload"] <= 2 * 2.147 * 32
    assert parts["exposed offload"] == 0 or layers < 2 * 2.147


def test_ring_and_allgather_buffers():
    ring, gathered = RUN_1M, replace(RUN_1M, rotate_method="allgather")
    kv = 2 * 131072 * 1024
    assert (ring_bytes(ring), exchange_bytes(ring)) == (kv * (2 * 2 + 4), kv * 4)
    assert (ring_bytes(gathered), exchange_bytes(gathered)) == (0, 8 * kv * (2 + 6))
    pair = replace(RUN_1M, cp=2, seq_len=2 * 131072)  # keys and values travel once
    assert (ring_bytes(pair), exchange_bytes(pair)) == (kv * (2 + 4), kv * 4)
    alone = replace(RUN_1M, cp=1, seq_len=131072)
    assert (ring_bytes(alone), exchange_bytes(alone)) == (0, 0)
    # Receive buffers stay through the step, gathered keys and values for one layer's attention.
    assert "ring buffers" in plan_memory(ring).at_peak
    attention = (
        layer_bytes(gathered)["attention backward"] - layer_bytes(ring)["attention backward"]
    )
    assert attention == exchange_bytes(gathered) - exchange_bytes(ring)


def test_deterministic_attention_splits_dq_over_the_gpu():
    """132 multiprocessors and 32 heads: five copies of 2 GiB, 131,072 rows of 4,096 in float32."""
    deterministic = replace(RUN_1M, deterministic_on=132)
    assert kernel_bytes(deterministic) - kernel_bytes(RUN_1M) == 4 * 2 * GIB
    packed = replace(deterministic, documents=(2**18,) * 4)  # 128 sequences of heads, two shares
    assert kernel_bytes(packed) == 2 * 4 * GIB + 2 * GIB
    # Ranks that share heads have four each, for as many queries in all.
    shared = replace(deterministic, ulysses=8)
    assert kernel_bytes(shared) - kernel_bytes(RUN_1M) == 32 * 2 * GIB


PACKED = replace(
    RUN_1M,
    cp=32,
    documents=(2**16,) * 16,
    levers=Levers(),
)


def test_ranks_that_share_heads_have_fewer_longer_tiles():
    flat, shared = with_counted_pairs(PACKED), with_counted_pairs(replace(PACKED, ulysses=8))
    assert (flat.ring, flat.ring_tokens) == (32, 32_768)
    assert (shared.ring, shared.ring_tokens) == (4, 262_144)
    # The same pairs, 1/8 of the heads: a tile takes 8 times as long, and the same bytes hop.
    assert len(tile_pairs(shared)) == 4
    assert sum(tile_pairs(shared)) / 8 == pytest.approx(sum(tile_pairs(flat)), rel=0.01)
    assert kv_hop_bytes(shared) == kv_hop_bytes(flat)
    # More ranks than key heads: copies travel.
    many = replace(shared, ulysses=32)
    assert kv_hop_bytes(many) == 4 * kv_hop_bytes(flat)
    assert (ring_bytes(many), exchange_bytes(many)) == (0, 0)


def test_messages_of_ranks_that_share_heads():
    """2q + 2k elements of 2 bytes forward, twice that backward, over NVLink; 32,768 tokens."""
    shared = replace(RUN_1M, cp=32, ulysses=8)
    forward, backward = exchange_seconds(shared, H100, IB)
    assert backward == 2 * forward
    travels = 2 * 32_768 * (2 * 4096 + 2 * 1024) * 7 / 8 / (396e9)
    copies = 2 * 32_768 * (2 * 4096 + 2 * 1024) * 4 / (3350e9 * 0.85)
    assert forward == pytest.approx(travels + copies)
    assert exchange_seconds(replace(shared, ulysses=1), H100, IB) == (0, 0)
    # Of q, k, v, out and its gradient.
    assert shared_heads_bytes(shared) == 2 * 32_768 * (3 * 4096 + 2 * 1024)


def test_an_exposed_ring_names_the_degree_that_hides_it():
    plan = make_plan(with_counted_pairs(PACKED), H100, IB)
    text = exposed_ring_text(plan, IB)
    found = re.fullmatch(
        r"hops of the ring that nothing hides take (\d\d\.\d)% of a step; with "
        r"striped_cp\.ulysses_degree = 8: ([\d.]+) tokens/s/GPU",
        text,
    )
    assert float(found[1]) > 25
    assert float(found[2]) > 1.5 * plan.time.tokens_per_second_per_gpu
    assert exposed_ring_text(make_plan(RUN_1M, H100, IB), IB) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ulysses": 3}, "does not divide parallelism.context_parallel_degree = 8"),
        ({"cp": 64, "ulysses": 64}, "does not divide the 32 query heads"),
        ({"cp": 8, "tp": 8, "ulysses": 8}, "does not divide the 4 query heads .* divisors of 4"),
    ],
)
def test_ranks_that_cannot_share_heads_are_refused(changes, message):
    with pytest.raises(ValueError, match=rf"striped_cp.ulysses_degree = \d+: {message}"):
        check(replace(RUN_1M, **changes), H100)


def test_rope_is_of_this_rank_only():
    assert rope_bytes(RUN_1M) == 512 * 2**20 / 8


def test_fsdp_keeps_the_output_projection_gathered():
    layer, output = 218_112_000, 128256 * 4096
    assert gathered_bytes(RUN_1M) == 2 * (3 * layer + output) + 6 * output
    assert gathered_bytes(replace(RUN_1M, reshard_after_forward="never")) == (
        2 * 8_030_261_248 + 6 * output
    )


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "microbatches", "in_flight", "bubble"),
    [
        ("1F1B", 1, 8, 4, 3 / 8),
        ("GPipe", 1, 8, 8, 3 / 8),
        ("GPipe", 1, 2, 2, 3 / 2),
        ("Interleaved1F1B", 2, 8, 5.5, 3 / 16),
        ("Interleaved1F1B", 2, 10, 6, 3 / 20),
        ("Interleaved1F1B", 2, 2, 2, 5 / 4),
        ("LoopedBFS", 2, 8, 8, 3 / 16),
    ],
)
def test_pipeline(schedule, virtual_stages, microbatches, in_flight, bubble):
    run = Run(
        LLAMA3.flavors["8B"],
        8192,
        local_batch=microbatches,
        pp=4,
        pp_schedule=schedule,
        virtual_stages=virtual_stages,
    )
    assert in_flight_microbatches(run) == in_flight
    assert bubble_share(run) == bubble
    check(run, H100)


def test_a_hop_hides_from_the_length_that_the_plan_names():
    run = Run(LLAMA3.flavors["8B"], 2**20, cp=32, levers=Levers())
    hop = plan_time(run, H100, IB).hops["forward"]
    assert hop.hidden
    length = round(hop.hides_from_local_tokens)
    for local_tokens, hidden in ((length * 11 // 10, True), (length * 9 // 10, False)):
        shorter = plan_time(replace(run, seq_len=32 * local_tokens), H100, IB).hops["forward"]
        assert shorter.hidden is hidden
    exposed = plan_time(replace(run, seq_len=32 * length // 2), H100, IB).parts["exposed ring"]
    assert exposed > 0


def test_ring_inside_a_node_is_faster_than_across():
    inside = plan_time(Run(LLAMA3.flavors["8B"], 2**20, cp=8), H100, IB).hops["forward"]
    across = plan_time(Run(LLAMA3.flavors["8B"], 2**20, cp=4, tp=4), H100, IB).hops["forward"]
    # Half of the bytes per token (tp 4, twice the tokens), over 45 instead of 396 GB/s.
    assert across.bytes == inside.bytes / 2
    assert across.seconds / inside.seconds == pytest.approx(396 / 45 / 2)


def test_contiguous_tiles_are_almost_twice_the_work():
    contiguous = sum(tile_pairs(replace(RUN_1M, layout="contiguous")))
    striped = sum(tile_pairs(RUN_1M))
    assert contiguous / striped == pytest.approx(15 / 8, rel=1e-4)


def test_fp8_speeds_up_linear_layers_only():
    plain, fp8 = (plan_time(replace(RUN_1M, float8=on), H100, IB).parts for on in (False, True))
    assert fp8["linear layers"] == pytest.approx(plain["linear layers"] / 1.5)
    assert fp8["attention kernels"] == plain["attention kernels"]


def test_packed_documents_count_visible_pairs_only():
    assert Run(LLAMA3.flavors["8B"], 5, documents=(3, 2)).pairs == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, "tensor_parallel_degree = 3: does not divide the 8 key heads"),
        ({"tp": 16}, "8 key heads"),
        ({"cp": 7}, "1048576: not divisible by parallelism.context_parallel_degree = 7"),
        ({"pp": 64, "local_batch": 64}, "64 stages, too many for the 32 layers"),
        ({"pp": 4}, "needs 4 microbatches at least"),
        ({"kernel": "cpu"}, 'striped_cp.kernel = "cpu": no published rate'),
        ({"documents": (5, 6)}, "add up to 11 tokens"),
    ],
)
def test_impossible_runs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check(replace(RUN_1M, **changes), H100)


def test_names_of_gpus_and_networks():
    assert gpu_from_device_name("NVIDIA H100 80GB HBM3") == "h100"
    assert gpu_from_device_name("AMD Instinct MI300X") == "mi300x"
    assert gpu_from_device_name("NVIDIA GH200 480GB") is None
    assert gpu_from_device_name("CPU") is None
    with pytest.raises(ValueError, match='"h10": unknown; known: a100, h100'):
        find_gpu("h10")
    with pytest.raises(ValueError, match='--network "wifi"'):
        find_network_gb_s("wifi")


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_every_gpu_plans_the_default_kernel(gpu):
    check(RUN_1M, gpu)
    assert plan_time(RUN_1M, gpu, IB).step_seconds > 0


def test_a_block_saves_the_activations_that_the_planner_counts():
    from recipes.models.decoder.args import args_of
    from recipes.models.decoder.model import TransformerBlock

    tokens, dim = 512, 256
    shape = ModelShape(dim, 1, 4, 2, 704, 512, head_dim=64)
    block = TransformerBlock(0, args_of(LLAMA3, shape)).to(torch.bfloat16)
    weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.dtype == torch.bfloat16 and storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(1, tokens, dim, dtype=torch.bfloat16, requires_grad=True)
    rotation = torch.ones(1, tokens, 1, 32, dtype=torch.complex64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, rotation, None)

    run = Run(shape, tokens, levers=Levers(checkpointing="none"))
    # CPU's norms save float32 copies where CUDA's save their two inputs.
    norm_inputs = 2 * tokens * dim * 2
    assert sum(saved.values()) + norm_inputs == checkpoint_bytes(run)
