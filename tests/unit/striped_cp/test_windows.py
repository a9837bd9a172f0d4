"""Sliding windows and sinks: tiles by enumeration, the ring against dense attention in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from striped_cp import Contiguous, Documents, HeadTail, Striped
from striped_cp.blocks import COUNT, K_LEN, Q_LEN, Mask
from striped_cp.tiles import tiles_of_rank
from tests.helpers.loopback import random_inputs, run_loopback
from tests.helpers.own_layout import Rounds, Snake
from tests.helpers.reference import check_all_close, reference_gradients
from tests.unit.striped_cp.test_ring import packing
from tests.unit.striped_cp.test_tiles import S, busy_share, enumerate_pass, ragged_lengths

LAYOUTS = [Striped(), HeadTail(), Contiguous()]


@st.composite
def cases(draw):
    layout = draw(st.sampled_from([*LAYOUTS, Rounds()]))
    world_size = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    seq_len = layout.divisor(world_size) * draw(st.integers(1, 9))
    window = draw(st.integers(1, seq_len + 2))
    if draw(st.booleans()):
        return layout, world_size, seq_len, window, None
    cuts = st.lists(st.integers(0, seq_len), max_size=6)
    rows = [[0, *sorted(draw(cuts)), seq_len] for _ in range(draw(st.integers(1, 2)))]
    return layout, world_size, seq_len, window, Documents.from_cu_seqlens(rows)


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_tiles_cover_each_visible_pair_once_and_no_other(case):
    """Both as windowed passes and as the passes without a window that stand for them."""
    layout, world_size, seq_len, window, documents = case
    rows, batch = seq_len // world_size, 1 if documents is None else documents.batch_size
    bounds = np.array([[0, seq_len]]) if documents is None else documents.boundaries.numpy()
    positions = [layout.positions(seq_len, world_size, r).numpy() for r in range(world_size)]
    steps = set()
    for p in range(world_size):
        tiles = tiles_of_rank(layout, seq_len, world_size, p, documents, window)
        steps.add(len(tiles))
        for step in range(world_size):
            r = (p - step) % world_size
            distance = positions[p][:, None] - positions[r]
            computed = np.zeros((batch, rows, rows), dtype=int)
            if step < len(tiles):
                tile = tiles[step]
                assert (tile.query_rank, tile.key_rank) == (p, r)
                plain = [x for windowed in tile.passes for x in windowed.unwindowed]
                assert all(x.window is None for x in plain)
                each = [enumerate_pass(x, batch, rows) for x in plain]
                computed = sum(each, start=computed)
                assert tile.pairs == sum(x.pairs for x in plain) == computed.sum()
                if step == 0:  # the ring writes what comes first, and merges the rest
                    assert plain[0].mask is Mask.CAUSAL
                    assert (each[0].sum(-1) > 0).all()
                    assert (each[0].sum(-2) > 0).all()
            for b in range(batch):
                q_doc, k_doc = (
                    np.searchsorted(bounds[b], positions[x], side="right") for x in (p, r)
                )
                seen = (distance >= 0) & (distance < window) & (q_doc[:, None] == k_doc)
                assert (computed[b] == seen).all()
    assert len(steps) == 1, "all ranks take as many steps"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 6, 64, 1000])
def test_token_stripes_have_one_local_window_per_tile(world_size, window):
    """Query i of rank p sees key j of rank r iff [r > p] <= i - j <= (w - 1 - (p - r)) // P."""
    for p in range(world_size):
        for tile in tiles_of_rank(Striped(), 1024 * world_size, world_size, p, None, window):
            r = tile.key_rank
            local = (window - 1 - (p - r)) // world_size + 1 - (r > p)
            (only,) = tile.passes or (None,)
            if local <= 0:
                assert only is None
            else:
                assert (only.mask, len(only.blocks)) == (Mask.CAUSAL, 1)
                assert only.window == (local if local < 1024 else None)
                assert len(only.unwindowed) <= 3


@pytest.mark.parametrize(
    ("layout", "window", "steps"),
    [
        (Contiguous(), 1, 1),  # a token sees itself
        (Contiguous(), 2, 2),
        (Contiguous(), 101, 2),
        (Contiguous(), 102, 3),
        (Contiguous(), 701, 8),
        (Striped(), 1, 1),
        (Striped(), 5, 5),
        (Striped(), 8, 8),
        (Striped(), 800, 8),
    ],
)
def test_steps_in_which_no_rank_sees_anything_are_left_out(layout, window, steps):
    for p in range(8):
        assert len(tiles_of_rank(layout, 800, 8, p, None, window)) == steps


@pytest.mark.parametrize(
    ("window", "one", "packed"),
    [
        (128, (1.000, 0.996, 1.000), (1.000, 0.990, 0.990)),
        (1024, (1.000, 0.966, 0.996), (1.000, 0.924, 0.924)),
        (4096, (1.000, 0.875, 0.984), (1.000, 0.735, 0.751)),
        (32_768, (1.000, 0.519, 0.875), (1.000, 0.302, 0.312)),
    ],
)
def test_balance_in_a_window(window, one, packed):
    """docs/reference/parallelism.md has these figures."""
    for lengths, wanted in (([S], one), (ragged_lengths(20), packed)):
        shares = [busy_share(layout, 8, lengths, window) for layout in LAYOUTS]
        assert shares == pytest.approx(wanted, abs=6e-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
@pytest.mark.parametrize("window", [256, 1000, 4096])
def test_work_follows_the_visible_pairs(layout, window):
    """At most twice, were triangles computed as squares, and in few kernel calls."""
    seq_len, world_size = 32_768, 8
    tiles = [
        tile
        for p in range(world_size)
        for tile in tiles_of_rank(layout, seq_len, world_size, p, None, window)
    ]
    blocks = [x.blocks for tile in tiles for windowed in tile.passes for x in windowed.unwindowed]
    squares = sum(int((b[:, Q_LEN] * b[:, K_LEN] * b[:, COUNT]).sum()) for b in blocks)
    visible = seq_len * window - window * (window - 1) // 2
    assert sum(tile.pairs for tile in tiles) == visible
    assert squares <= 2 * visible
    assert sum(map(len, blocks)) <= 6 * len(tiles)


@pytest.mark.parametrize("layout", [Striped(2), Striped(128), Snake(2)], ids=lambda x: x.spec)
def test_layouts_without_windows_are_refused_by_name(layout):
    seq_len = layout.divisor(2) * 2
    with pytest.raises(ValueError, match=rf"layout = '{layout.spec}' has no sliding windows"):
        tiles_of_rank(layout, seq_len, 2, 0, None, 3)
    assert tiles_of_rank(layout, seq_len, 2, 0, None, seq_len)  # sees everything: no window


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_parity_in_float64(world_size, layout, packed):
    """Every window with both rotations and without sinks and with them, in turn."""
    seq_len = 80 // world_size * world_size
    inputs = random_inputs(2, (4, 2), seq_len, 8, torch.float64)
    sinks = torch.tensor([-3.0, 0.0, 1.0, 6.0], dtype=torch.float64)
    documents = packing(seq_len) if packed else None
    edges = {world_size + 1, world_size, max(1, world_size - 1)}
    windows = sorted({1, 2, 7, 64, seq_len - 1, seq_len, 2 * seq_len} | edges)
    for number, window in enumerate(windows):
        for rotate_method in ("ring", "allgather"):
            how = {"window": window, "sinks": sinks if (number + packed) % 2 else None}
            got = run_loopback(
                inputs, layout, world_size, documents, rotate_method=rotate_method, **how
            )
            want = reference_gradients(*inputs, documents, **how)
            check_all_close(got, want, f"window {window} {rotate_method}")


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_cpu_kernel_in_float32(layout, heads):
    inputs = random_inputs(2, heads, 96, 16, torch.float32, 2.0)
    sinks = torch.linspace(-2, 4, 4)
    for documents in (None, packing(96)):
        for window in (1, 5, 31, None):
            how = {"window": window, "sinks": sinks}
            got = run_loopback(inputs, layout, 4, documents, kernel="cpu", **how)
            want = reference_gradients(*inputs, documents, **how)
            check_all_close(got, want)


@pytest.mark.parametrize("degree", [2, 4])
def test_ranks_that_share_heads_have_the_sinks_of_their_own(degree):
    inputs = random_inputs(2, (8, 2), 48, 8, torch.float64)
    sinks = torch.linspace(-2, 4, 8, dtype=torch.float64)
    for layout in LAYOUTS:
        how = {"window": 9, "sinks": sinks}
        got = run_loopback(inputs, layout, 4, ulysses_degree=degree, **how)
        check_all_close(got, reference_gradients(*inputs, **how))


@pytest.mark.parametrize("kernel", ["reference", "cpu"])
@pytest.mark.parametrize("value", [-1e4, 1e4, float("-inf"), float("inf")])
def test_huge_sinks_stay_finite(value, kernel):
    """One far below all logits changes nothing; one far above takes all weight."""
    inputs = random_inputs(1, (2, 1), 24, 8, torch.float32)
    sinks = torch.full((2,), value)
    got = run_loopback(inputs, Striped(), 4, sinks=sinks, kernel=kernel)
    plain = run_loopback(inputs, Striped(), 4, kernel=kernel)
    assert all(x.isfinite().all() for x in got)
    for x, y in zip(got, plain, strict=False):
        assert torch.equal(x, y if value < 0 else torch.zeros_like(y))


def test_a_sink_that_is_no_number_is_seen_in_its_head_alone():
    inputs = random_inputs(1, (2, 2), 24, 8, torch.float32)
    for x in run_loopback(inputs, Striped(), 1, sinks=torch.tensor([0.0, float("nan")])):
        heads = x.isnan().flatten() if x.dim() == 1 else x.isnan().all((0, 2, 3))
        assert heads.tolist() == [False, True]
