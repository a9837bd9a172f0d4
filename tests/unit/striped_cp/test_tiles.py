"""Tiles by enumeration: every visible pair exactly once, and the balance they promise."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from striped_cp import Contiguous, Documents, HeadTail, Layout, Striped
from striped_cp.blocks import COUNT, K_LEN, K_START, Q_LEN, Q_START, ROW, Mask, Pass
from striped_cp.tiles import tiles_of_rank
from tests.helpers.own_layout import Snake


def block_mask(mask: Mask, q_len: int, k_len: int) -> np.ndarray:
    full = np.ones((q_len, k_len), dtype=int)
    if mask is Mask.FULL:
        return full
    assert q_len == k_len, "triangles are square"
    return np.tril(full) if mask is Mask.CAUSAL else np.triu(full)


def enumerate_pass(tile_pass: Pass, batch: int, rows: int) -> np.ndarray:
    """How often the pass computes each pair: (batch, rows, rows)."""
    pairs = np.zeros((batch, rows, rows), dtype=int)
    queries, keys = np.zeros((batch, rows), dtype=int), np.zeros((batch, rows), dtype=int)
    for block in tile_pass.blocks:
        for i in range(block[COUNT]):
            q, k = (block[start] + i * tile_pass.stride for start in (Q_START, K_START))
            q_end, k_end = q + block[Q_LEN], k + block[K_LEN]
            assert 0 <= q < q_end <= rows
            assert 0 <= k < k_end <= rows
            visible = block_mask(tile_pass.mask, block[Q_LEN], block[K_LEN])
            pairs[block[ROW], q:q_end, k:k_end] += visible
            queries[block[ROW], q:q_end] += 1
            keys[block[ROW], k:k_end] += 1
    assert queries.max(initial=0) <= 1, "query rows of a pass are disjoint"
    assert keys.max(initial=0) <= 1, "key rows of a pass are disjoint"
    return pairs


@st.composite
def cases(draw):
    layout = draw(
        st.one_of(
            st.just(Striped()),
            st.builds(Striped, st.integers(2, 9)),
            st.just(HeadTail()),
            st.just(Contiguous()),
            st.builds(Snake, st.integers(1, 3)),
        )
    )
    world_size = draw(st.sampled_from([1, 2, 3, 4, 5, 8]))
    seq_len = layout.divisor(world_size) * draw(st.integers(1, 6))
    if draw(st.booleans()):
        return layout, world_size, seq_len, None
    cuts = st.lists(st.integers(0, seq_len), max_size=12)
    rows = [[0, *sorted(draw(cuts)), seq_len] for _ in range(draw(st.integers(1, 3)))]
    return layout, world_size, seq_len, Documents.from_cu_seqlens(rows)


@given(cases())
@settings(max_examples=300, deadline=None, derandomize=True)
def test_tiles_cover_each_visible_pair_once_and_no_other(case):
    layout, world_size, seq_len, documents = case
    rows, batch = seq_len // world_size, 1 if documents is None else documents.batch_size
    bounds = np.array([[0, seq_len]]) if documents is None else documents.boundaries.numpy()
    positions = [layout.positions(seq_len, world_size, r).numpy() for r in range(world_size)]
    for p in range(world_size):
        for step, tile in enumerate(tiles_of_rank(layout, seq_len, world_size, p, documents)):
            r = (p - step) % world_size
            assert (tile.query_rank, tile.key_rank) == (p, r)
            computed = sum(
                (enumerate_pass(x, batch, rows) for x in tile.passes),
                start=np.zeros((batch, rows, rows), dtype=int),
            )
            q_pos, k_pos = positions[p], positions[r]
            for b in range(batch):
                q_doc = np.searchsorted(bounds[b], q_pos, side="right")
                k_doc = np.searchsorted(bounds[b], k_pos, side="right")
                visible = (q_pos[:, None] >= k_pos) & (q_doc[:, None] == k_doc)
                assert (computed[b] == visible).all()
            assert tile.pairs == computed.sum()
            if p == r:  # the ring writes this tile's output instead of merging it
                assert (computed.sum(-1) > 0).all()
                assert all(x.mask is Mask.CAUSAL for x in tile.passes)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2, 5, 7])
def test_token_stripes_are_one_causal_square_per_step(world_size, rows):
    for p in range(world_size):
        for tile in tiles_of_rank(Striped(), rows * world_size, world_size, p):
            shifted = tile.key_rank > p
            squares = [(x.mask, x.blocks.tolist()) for x in tile.passes]
            length = rows - shifted
            block = [0, int(shifted), length, 0, length, 1]
            assert squares == ([(Mask.CAUSAL, [block])] if length else [])


def test_one_pass_per_step_however_many_documents():
    cuts = sorted(np.random.default_rng(0).choice(np.arange(1, 4096), 500, replace=False).tolist())
    documents = Documents.from_cu_seqlens([[0, *cuts, 4096]])
    for p in range(4):
        for tile in tiles_of_rank(Striped(), 4096, 4, p, documents):
            assert len(tile.passes) == 1
            assert len(tile.passes[0].blocks) <= 501


def test_plans_are_shared_by_equal_batches():
    first = Documents.from_cu_seqlens([[0, 5, 16]])
    again = Documents.from_cu_seqlens([[0, 5, 16]])
    other = Documents.from_cu_seqlens([[0, 6, 16]])
    tiles = tiles_of_rank(Striped(), 16, 2, 1, first)
    assert tiles_of_rank(Striped(), 16, 2, 1, again) is tiles
    assert tiles_of_rank(Striped(), 16, 2, 1, other) is not tiles


def test_documents_of_another_length_are_refused():
    with pytest.raises(ValueError, match="documents end at 12, but the sequence has 16 tokens"):
        tiles_of_rank(Striped(), 16, 2, 0, Documents.from_cu_seqlens([[0, 12]]))


def busy_share(
    layout: Layout, world_size: int, lengths: list[int], window: int | None = None
) -> float:
    """sum(work) / (P * sum over steps of the slowest rank)."""
    ends = np.cumsum(lengths).tolist()
    documents = Documents.from_cu_seqlens([[0, *ends]])
    work = np.array(
        [
            [x.pairs for x in tiles_of_rank(layout, ends[-1], world_size, p, documents, window)]
            for p in range(world_size)
        ]
    )
    return work.sum() / (world_size * work.max(axis=0).sum())


S = 131_072


@pytest.mark.parametrize(
    ("lengths", "contiguous", "headtail", "blocks", "tokens"),
    [
        ([S], 0.533, 1.000, 0.993, 1.000),
        ([S * 3 // 4, S // 4], 0.455, 0.625, 0.989, 1.000),
    ],
)
def test_balance_at_eight_ranks(lengths, contiguous, headtail, blocks, tokens):
    expected = {
        Contiguous(): contiguous,
        HeadTail(): headtail,
        Striped(128): blocks,
        Striped(): tokens,
    }
    for layout, share in expected.items():
        assert busy_share(layout, 8, lengths) == pytest.approx(share, abs=6e-4), layout


@pytest.mark.parametrize("world_size", [2, 8, 32])
@pytest.mark.parametrize("length", [64, 100, 128, 1024, 1025])
def test_balance_of_equal_documents(world_size, length):
    """The worst case: every document starts on the same rank, which has a token more to see.

    A document of n = L/P tokens a rank is then balanced to n / (n + 1), so to P/L at least.
    """
    lengths = [length] * (8192 // length)
    lengths[-1] += -sum(lengths) % world_size
    assert busy_share(Striped(), world_size, lengths) > 1 - 1.01 * world_size / length


def ragged_lengths(num_documents: int) -> list[int]:
    weights = np.random.default_rng(7).lognormal(sigma=1.5, size=num_documents)
    lengths = np.maximum(1, (weights / weights.sum() * S).astype(int))
    lengths[0] += S - lengths.sum()
    return lengths.tolist()


@pytest.mark.parametrize(("world_size", "num_documents"), [(4, 20), (16, 33)])
def test_balance_of_ragged_documents(world_size, num_documents):
    """Stripes stay balanced for any packing; layouts of long runs do not."""
    lengths = ragged_lengths(num_documents)
    assert busy_share(Striped(), world_size, lengths) > 0.998
    assert busy_share(Striped(128), world_size, lengths) > 0.9
    assert busy_share(HeadTail(), world_size, lengths) < 0.7
    assert busy_share(Contiguous(), world_size, lengths) < 0.6
