"""How often the ring communicates in one training step, by kind of checkpointing.

Hops of one layer and rank in a ring of P: P - 1 forward; backward P - 1 for keys and values and P
for their gradients, which end up at home.
"""

import pytest
import torch.distributed as dist

from tests.helpers.launch import run_ranks
from tests.helpers.model_step import Step

LAYERS = 4
MODE = "--activation_checkpoint.mode"
OPTION = "--activation_checkpoint.selective_ac_option"
AGAIN = "--memory.recompute_attention"
OFFLOAD = "--memory.offload_checkpoints"
COMPILED = ["--compile.enable", "--compile.backend", "aot_eager"]
# Settings, and how many layers run their ring twice.
CASES = {
    "none": ([MODE, "none"], 0),
    "full": ([MODE, "full"], 0),
    "full, recomputed": ([MODE, "full", AGAIN], LAYERS),
    "full, offloaded": ([MODE, "full", OFFLOAD], 0),
    "full, recomputed, offloaded": ([MODE, "full", AGAIN, OFFLOAD], LAYERS),
    "full, compiled, chunks": ([MODE, "full", *COMPILED, "--memory.mlp_chunk_tokens", "24"], 0),
    "every second": ([MODE, "selective", OPTION, "2"], 0),
    "every second, recomputed": ([MODE, "selective", OPTION, "2", AGAIN], LAYERS // 2),
    "operators": ([MODE, "selective", OPTION, "op"], 0),
    "operators, recomputed": ([MODE, "selective", OPTION, "op", AGAIN], LAYERS),
}


def count_hops(cases):
    """Forward and all hops of one step, by case."""
    post, posts = dist.batch_isend_irecv, []

    def spy(operations):
        posts.append(1)
        return post(operations)

    dist.batch_isend_irecv = spy
    hops = {}
    for name, (overrides, _) in cases.items():
        size = dist.get_world_size()
        settings = ["--parallelism.context_parallel_degree", str(size)]
        step = Step(*settings, "--training.seq_len", str(32 * size), *overrides)
        posts.clear()
        step.run()
        hops[name] = len(posts)
    dist.batch_isend_irecv = post
    return hops


@pytest.mark.parametrize("world_size", [2, 3])
def test_hops(world_size):
    cases = CASES if world_size == 2 else {k: CASES[k] for k in ("full", "full, recomputed")}
    forward, backward = world_size - 1, 2 * world_size - 1
    for hops in run_ranks(world_size, count_hops, cases):
        for name, (_, twice) in cases.items():
            assert hops[name] == LAYERS * (forward + backward) + twice * forward, name


def test_the_method_of_the_settings_is_the_rings():
    """torchtitan 0.2.2 reads a rotate method and does nothing with it."""
    cases = {"allgather": (["--striped_cp.rotate_method", "allgather"], 0)}
    assert run_ranks(2, count_hops, cases) == [{"allgather": 0}] * 2


def rings():
    """Layout, method and kernel of every layer's attention."""
    step = Step(
        *("--parallelism.context_parallel_degree", "2", "--striped_cp.block_size", "8"),
        *("--striped_cp.rotate_method", "allgather", "--striped_cp.kernel", "reference"),
    )
    blocks = step.parts[0].layers.values()
    modules = [block.attention.inner_attention.forward.__self__ for block in blocks]
    return [(ring.layout.spec, ring.rotate_method, ring.kernel) for ring in modules]


def test_settings_reach_the_attention_of_every_layer():
    expected = [("striped:8", "allgather", "reference")] * LAYERS
    assert run_ranks(2, rings) == [expected] * 2
