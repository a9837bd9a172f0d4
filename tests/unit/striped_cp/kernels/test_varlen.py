"""Variable-length calls by enumeration, and what they launch and allocate."""

from itertools import pairwise, product

import numpy as np
import pytest

from striped_cp import Contiguous, Documents, HeadTail, Layout, Striped
from striped_cp.blocks import Mask, Pass
from striped_cp.kernels import varlen
from striped_cp.kernels.varlen import GRID, Call, calls_of
from striped_cp.tiles import tiles_of_rank
from tests.helpers.own_layout import Snake
from tests.unit.striped_cp.test_tiles import enumerate_pass

LAYOUTS = [Striped(), Striped(3), HeadTail(), Contiguous(), Snake(2)]
DOCUMENTS = Documents.from_cu_seqlens([[0, 1, 2, 9, 30, 31, 60], [0, 40, 41, 42, 43, 60]])


def pairs_of(call: Call, of: Pass, total: int) -> np.ndarray:
    """How often the kernel computes each pair of packed rows."""
    mask = of.mask
    hidden = -total if of.window is None else -of.window  # the diagonal of what a window hides
    pairs = np.zeros((total, total), dtype=int)
    rows, keys = np.arange(*call.queries), np.arange(*call.keys)
    reverse = mask is Mask.ANTICAUSAL
    if call.segments is None:
        square = np.ones((len(rows), len(keys)), dtype=int)
        half = {Mask.CAUSAL: np.tril(square), Mask.ANTICAUSAL: np.triu(square)}
        half[Mask.CAUSAL] -= np.tril(square, hidden)
        pairs[np.ix_(rows, keys)] = half.get(mask, square)
        return pairs
    if reverse:
        rows, keys = rows[::-1], keys[::-1]
    if call.query_rows is not None:
        rows = rows[call.query_rows]
    if call.key_rows is not None:
        keys = keys[call.key_rows]
    assert call.segments.sum(0).tolist() == [len(rows), len(keys)]
    ends = np.concatenate([np.zeros((1, 2), int), call.segments.cumsum(0)])
    for (q, k), (q_end, k_end) in pairwise(ends.tolist()):
        block = np.ones((q_end - q, k_end - k), dtype=int)
        if mask is not Mask.FULL:  # causal, aligned to the bottom right, and the window with it
            diagonal = (k_end - k) - (q_end - q)
            block = np.tril(block, diagonal) - np.tril(block, diagonal + hidden)
        pairs[np.ix_(rows[q:q_end], keys[k:k_end])] += block
    assert (pairs[rows[call.idle]] == 0).all()
    return pairs


@pytest.mark.parametrize("grid", [128, 4], ids=["one call", "long ones alone"])
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("layout", "window"),
    [
        *((x, None) for x in LAYOUTS),
        *product([Striped(), HeadTail(), Contiguous()], (1, 2, 5, 16, 44)),
    ],
    ids=lambda x: getattr(x, "spec", str(x)),
)
def test_calls_compute_exactly_the_pass(
    layout: Layout,
    window: int | None,
    packed: bool,
    grid: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(varlen, "GRID", grid)
    seq_len, world_size, batch = 60, 2, 2
    rows = seq_len // world_size
    documents = DOCUMENTS if packed else Documents.from_cu_seqlens([[0, 60], [0, 60]])
    for p in range(world_size):
        for tile in tiles_of_rank(layout, seq_len, world_size, p, documents, window):
            for tile_pass in tile.passes:
                calls = calls_of(tile_pass, batch, rows)
                found = sum(pairs_of(call, tile_pass, batch * rows) for call in calls)
                wanted = sum(enumerate_pass(x, batch, rows) for x in tile_pass.unwindowed)
                for row, want in enumerate(wanted):
                    here = slice(row * rows, (row + 1) * rows)
                    assert (found[here, here] == want).all()
                    found[here, here] = 0
                assert not found.any()
                for ranges in ([c.queries for c in calls], [c.keys for c in calls]):
                    assert all(end <= first for (_, end), (first, _) in pairwise(ranges))


def packing(seq_len: int, mean: float, long: int = 0) -> Documents:
    rng = np.random.default_rng(0)
    cuts = [0, long] if long else [0]
    while cuts[-1] < seq_len:
        length = max(1, int(rng.lognormal(np.log(mean) - 0.5, 1.0)))
        cuts.append(min(seq_len, cuts[-1] + length))
    return Documents.from_cu_seqlens([cuts])


@pytest.mark.parametrize(
    ("layout", "mean", "long"),
    [
        (Striped(), 512, 0),
        (Striped(), 1000, 0),
        (Striped(), 2000, 0),
        (Striped(), 1000, 2**19),
        (Striped(16), 2000, 0),
        (HeadTail(), 1000, 2**19),
    ],
    ids=str,
)
def test_few_segments_small_accumulators_and_grids_that_have_work(
    layout: Layout, mean: int, long: int
) -> None:
    seq_len, world_size = 2**20, 8
    rows = seq_len // world_size
    documents = packing(seq_len, mean, long)
    for tile in tiles_of_rank(layout, seq_len, world_size, 4, documents):
        for tile_pass in tile.passes:
            calls = calls_of(tile_pass, 1, rows)
            shared = [call.segments for call in calls if call.segments is not None]
            segments = sum(map(len, shared))
            if layout == Striped():
                assert segments <= documents.boundaries.shape[1] - 1 + 2
            for some in shared:
                assert len(some) <= 65_535
                assert some[:, 0].sum() + GRID * len(some) <= 2 * rows
            lengths = [call.queries[1] - call.queries[0] for call in calls if call.segments is None]
            alone = sum(-(-length // GRID) for length in lengths)
            launched = alone + sum(len(s) * -(-int(s[:, 0].max()) // GRID) for s in shared)
            has_work = tile_pass.blocks[:, 2]
            needed = (tile_pass.blocks[:, 5] * -(-has_work // GRID)).sum()
            assert launched <= 4 * needed
            assert len(calls) <= 64
