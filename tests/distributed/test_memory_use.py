"""What the memory levers save: bytes alive during one training step of the debug model.

The figures of docs/reference/memory.md: python -m tests.distributed.test_memory_use
"""

import pytest
import torch.distributed as dist

from recipes.memory import offload
from tests.distributed.test_memory_levers import PLAIN
from tests.helpers.launch import run_ranks
from tests.helpers.live_bytes import LiveBytes
from tests.helpers.model_step import Step

FULL = ["--activation_checkpoint.mode", "full"]
LOSS = ["--memory.loss_chunk_tokens", "512"]
MLP = ["--memory.mlp_chunk_tokens", "512"]
OFFLOAD = ["--memory.offload_checkpoints"]
LEVERS = {
    "plain": [],
    "loss in chunks": LOSS,
    "checkpoints, attention kept": FULL,
    "checkpoints, attention recomputed": [*FULL, "--memory.recompute_attention"],
    "checkpoints, loss in chunks": [*FULL, *LOSS],
    "checkpoints, loss and MLP in chunks": [*FULL, *LOSS, *MLP],
    "all: checkpoints offloaded too": [*FULL, *LOSS, *MLP, *OFFLOAD],
}


def measure(seq_len, levers):
    """By lever: loss, peak bytes, and bytes alive between forward and backward, of this rank."""
    size = ["--training.seq_len", str(seq_len), "--training.local_batch_size", "1"]
    size += ["--parallelism.context_parallel_degree", str(dist.get_world_size())]
    return {name: measure_step(Step(*size, *PLAIN, *LEVERS[name])) for name in levers}


def measure_step(step):
    live, kept = LiveBytes(), []
    to_host = offload._empty_on_host
    offload._empty_on_host = lambda tensor: live.leave_out(to_host(tensor))
    loss_fn = step.loss_fn

    def spy(*args):
        loss = loss_fn(*args)
        kept.append(live.settled())
        return loss

    step.loss_fn = spy
    try:
        with live:
            loss = step.run().item()
    finally:
        offload._empty_on_host = to_host
    return {"loss": loss, "peak": live.peak, "kept": kept[0]}


def assert_a_quarter(results):
    plain, everything = results["plain"], results["all: checkpoints offloaded too"]
    assert everything["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert everything["peak"] <= plain["peak"] / 4


def test_all_levers_take_a_quarter():
    for results in run_ranks(2, measure, 4096, ["plain", "all: checkpoints offloaded too"]):
        assert_a_quarter(results)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_levers_take_a_quarter_at_16k():
    for results in run_ranks(2, measure, 16_384, list(LEVERS), timeout=800):
        assert_a_quarter(results)
        for values in results.values():
            assert values["loss"] == pytest.approx(results["plain"]["loss"], rel=1e-5)


def kept_by_length(lengths, levers):
    """Bytes alive between forward and backward, by lever, for each length."""
    return [{k: v["kept"] for k, v in measure(n, levers).items()} for n in lengths]


def test_what_layers_keep_is_divided_by_the_ring():
    """What grows with the sequence, at cp 1, 2 and 4: activations, not parameters."""
    levers = ["plain", "checkpoints, attention kept"]
    kept = {size: run_ranks(size, kept_by_length, [512, 1024], levers)[0] for size in (1, 2, 4)}
    for name in levers:
        grown = {size: long[name] - short[name] for size, (short, long) in kept.items()}
        assert grown[2] / grown[1] == pytest.approx(1 / 2, rel=0.02), name
        assert grown[4] / grown[1] == pytest.approx(1 / 4, rel=0.02), name


if __name__ == "__main__":
    table = run_ranks(2, measure, 16_384, list(LEVERS), timeout=1500)[0]
    for name, values in table.items():
        share = values["peak"] / table["plain"]["peak"]
        peak, kept = (values[k] / 2**20 for k in ("peak", "kept"))
        print(f"| {name} | {peak:.0f} | {share:.2f} | {kept:.0f} | {values['loss']:.2f} |")
