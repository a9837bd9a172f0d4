"""The benchmark's arithmetic and options, and the memory of a ring's rank as the ring grows."""

import json
import subprocess
import sys
from dataclasses import replace

import bench_attention
import pytest
import torch
from bench.case import Case
from bench.measure import Samples, Timing, peak_memory
from bench.pairs import computed_over_visible
from bench.plot import plot
from bench.report import rows_of, table
from bench.virtual import VirtualRank, measure

from striped_cp import Contiguous, HeadTail, Striped
from striped_cp.kernels import KERNELS
from tests import ROOT


def case(**changes):
    return replace(Case("cpu", 2, 64, 1, 4, 2, 8, "float32"), **changes)


def samples():
    result = Samples({"striped": 100, "contiguous": 200})
    result.rings["striped"] = [Timing(1.0, 3.0), Timing(1.0, 4.0), Timing(2.0, 4.0)]
    result.rings["contiguous"] = [Timing(2.0, 5.5), Timing(2.0, 5.5), Timing(2.0, 5.5)]
    result.ideal = [Timing(1.0, 3.5)] * 3
    result.causal = [Timing(0.2, 0.4)] * 3
    result.full = [Timing(0.4, 0.8)] * 3
    return result


def test_rows_are_medians_and_their_ratios():
    striped, contiguous = rows_of(case(world_size=8), "virtual", samples())
    assert (striped["forward_s"], striped["backward_s"], striped["total_s"]) == (1.0, 4.0, 5.0)
    assert striped["ideal_s"] == 4.5
    assert striped["efficiency"] == pytest.approx(0.9)
    assert striped["speedup_vs_contiguous"] == pytest.approx(1.5)
    assert striped["total_spread"] == pytest.approx(0.4)
    assert (striped["causal_tile_s"], striped["full_tile_s"]) == pytest.approx((0.6, 1.2))
    assert striped["kernel_limit"] == pytest.approx(1.875)  # (2P - 1) / P
    assert striped["peak_bytes"] == 100
    assert contiguous["speedup_vs_contiguous"] == 1.0
    assert striped["ideal_alone_s"] is None


def test_ideal_of_a_rank_alone():
    measured = samples()
    measured.alone = [Timing(1.0, 3.0)] * 3
    row, _ = rows_of(case(), "distributed", measured)
    assert row["ideal_alone_s"] == 4.0
    assert "4000.0" in table([row])


def test_no_kernel_limit_with_documents_and_no_speedup_without_a_baseline():
    measured = samples()
    del measured.rings["contiguous"]
    (row,) = rows_of(case(documents=(60, 4)), "virtual", measured)
    assert (row["kernel_limit"], row["speedup_vs_contiguous"]) == (None, None)
    assert "striped" in table([row])


@pytest.mark.parametrize("rotate_method", ["ring", "allgather"])
def test_a_virtual_rank_times_every_step(rotate_method):
    rank = VirtualRank(case(world_size=4, rotate_method=rotate_method), Striped(), 3)
    for _ in range(2):
        forward, backward = rank.run()
        assert len(forward) == len(backward) == 4
        assert min(forward + backward) > 0


@pytest.mark.parametrize(("layout", "steps"), [(Striped(), 4), (Contiguous(), 2)])
def test_a_virtual_rank_in_a_window(layout, steps):
    """Of contiguous ranks only the neighbour's keys are in reach."""
    rank = VirtualRank(case(world_size=4, window=17), layout, 3)
    for seconds in rank.run():
        assert len(seconds) == steps
    measured = measure(case(world_size=4, window=17), {layout.spec: layout}, repeats=1)
    (row,) = rows_of(case(world_size=4, window=17), "virtual", measured)
    assert (row["window"], row["pairs_over_visible"], row["kernel_limit"]) == (17, 1.0, None)
    assert " 17 " in table([row])


def test_block_stripes_have_no_windows():
    case(world_size=4, window=17).check([Striped()])
    with pytest.raises(ValueError, match="'striped:4' has no sliding windows"):
        case(world_size=4, window=17).check([Striped(4)])


@pytest.mark.parametrize("documents", [None, (3000, 1096)])
@pytest.mark.parametrize("window", [None, 1024])
def test_pairs_computed_over_pairs_visible(monkeypatch, documents, window):
    """Passes are exact; FlexAttention computes whole blocks of 128 by 128."""
    of = case(world_size=2, seq_len=4096, documents=documents, window=window)
    for layout in (Striped(), HeadTail(), Contiguous()):
        assert computed_over_visible(of, layout) == 1.0
        with monkeypatch.context() as patch:
            patch.setattr(Case, "chosen_kernel", lambda self: KERNELS["flex"])
            assert 1.0 < computed_over_visible(of, layout) < 1.5


def test_a_virtual_rank_that_shares_heads():
    """Two tiles, and the time of packing before them; three heads of two ranks are refused."""
    rank = VirtualRank(case(world_size=4, ulysses=2, kv_heads=4), Striped(), 3)
    for steps in rank.run():
        assert len(steps) == 3
        assert min(steps) > 0
    with pytest.raises(ValueError, match="--ulysses 2 must divide --world-size 4 and --heads 3"):
        case(world_size=4, ulysses=2, heads=3, kv_heads=3)


def test_a_virtual_ring_adds_the_slowest_rank_of_every_step(monkeypatch):
    seconds = {0: ([1.0, 5.0], [7.0, 1.0]), 1: ([2.0, 3.0], [6.0, 2.0])}
    monkeypatch.setattr(VirtualRank, "run", lambda self: seconds[self.ring.rank])
    result = measure(case(), {"striped": Striped()}, repeats=1)
    assert result.rings["striped"] == [Timing(2.0 + 5.0, 7.0 + 2.0)]


@pytest.mark.parametrize("layout", [Striped(), HeadTail(), Contiguous()], ids=lambda x: x.spec)
def test_memory_of_a_rank_falls_with_the_ring(layout):
    """Peak of forward and backward beyond the inputs, bytes per token of the whole sequence.

    A single rank's divided by P, and the ring's buffers: K and V arriving, in two slots from P = 3
    on, and dK and dV arriving. Differences of two lengths: the kernel's scratch is constant.
    """
    heads, kv_heads, head_dim = 4, 1, 16

    def bytes_per_token(size):
        def peak(seq_len):
            shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
            rank = VirtualRank(case(world_size=size, seq_len=seq_len, **shape), layout, size - 1)
            return peak_memory("cpu", rank.run)

        return (peak(8192) - peak(4096)) / 4096

    alone = bytes_per_token(1)
    key_and_value = 2 * kv_heads * head_dim * 4
    for size, buffers in ((2, 2), (4, 3)):
        allowed = (alone + buffers * key_and_value) / size
        assert bytes_per_token(size) == pytest.approx(allowed, rel=0.02)


def test_peak_memory_counts_what_is_alive_at_once():
    def run():
        first = torch.empty(1000, dtype=torch.uint8)
        del first
        second = torch.empty(3000, dtype=torch.uint8)
        third = torch.empty(2000, dtype=torch.uint8)
        del second, third

    assert peak_memory("cpu", run) == 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3"], "--heads 3 must be a multiple of --kv-heads 2"),
        (["--documents", "3,4"], "--documents must sum to --seq-len 16384, not 7"),
        (["--layouts", "zigzag"], "layout 'zigzag': allowed are striped[:BLOCK_SIZE], headtail"),
        (["--seq-len", "17"], "sequence length 17 must be a positive multiple of 2"),
        (["--seq-len", "0"], "'0': allowed is an integer from 1 to 2147483647"),
        (["--seq-len", "256,"], "'': allowed is an integer"),
        (["--window", "1e23"], "'1e23': allowed is an integer"),
        (["--kernel", "flash"], "kernel = 'flash' cannot serve"),
        (["--end-to-end", "x.toml", "--head-dim", "8"], "--head-dim does not apply"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_refusals(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", *arguments])
    with pytest.raises((ValueError, SystemExit)) as refused:
        bench_attention.main()
    assert message in str(refused.value) + capsys.readouterr().err


ROW = {"layout", "mode", "world_size", "seq_len", "documents", "forward_s", "backward_s"}
ROW |= {"total_s", "ideal_s", "efficiency", "speedup_vs_contiguous", "kernel_limit"}


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


@pytest.mark.parametrize(
    ("launcher", "mode", "sizes"),
    [((), "virtual", (2, 3)), ((), "distributed", (2,)), (TORCHRUN, "distributed", (2,))],
    ids=["virtual", "spawned", "torchrun"],
)
def test_command_line(launcher, mode, sizes, tmp_path):
    file = tmp_path / "rows.json"
    shape = ("--seq-len", "96", "--heads", "2", "--kv-heads", "1", "--head-dim", "8")
    lists = (
        *("--world-size", ",".join(map(str, sizes)), "--documents", "64,32"),
        *("--layouts", "striped,contiguous"),
    )
    options = ("--mode", mode, "--repeats", "2", "--json", str(file))
    run = subprocess.run(
        [sys.executable, *launcher, "scripts/bench_attention.py", *shape, *lists, *options],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("efficiency") == 1  # one rank prints
    rows = json.loads(file.read_text())
    assert [(row["world_size"], row["layout"]) for row in rows] == [
        (size, layout) for size in sizes for layout in ("striped", "contiguous")
    ]
    for row in rows:
        assert row.keys() >= ROW
        assert row["mode"] == mode
        assert row["documents"] == [64, 32]
        assert row["efficiency"] == pytest.approx(row["ideal_s"] / row["total_s"])


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row
        for size in (2, 4)
        for row in rows_of(case(world_size=size, seq_len=64 * size), "virtual", samples())
    ]
    plot(tmp_path / "new" / "plot.png", rows)
    assert (tmp_path / "new" / "plot.png").read_bytes()[:4] == b"\x89PNG"
