"""Tiles: what the queries of one rank see of the keys of one rank, as few exact blocks.

For (layout, documents, query rank p, key rank r) this module answers one question: which rows of q
and k form which full or triangular blocks? A tile is a short tuple of passes. The blocks of one
pass share a mask and have disjoint query rows and disjoint key rows, so a pass is one
variable-length kernel call, or a loop of dense calls over views. Work and memory follow the visible
pairs; no (S/P) x (S/P) mask exists anywhere.

Token stripes, one document, P = 2: rank 0 holds tokens 0 2 4 6, rank 1 holds 1 3 5 7.

    q on rank 1, k on rank 0      q on rank 0, k on rank 1
         0 2 4 6                       1 3 5 7
      1  x                          0  .
      3  x x                        2  x              causal on q[1:], k[:-1]
      5  x x x                      4  x x
      7  x x x x                    6  x x x

Block stripes (block B, p != r): query block bq sees key blocks up to bq (r < p) or below bq (r > p)
as a whole. That staircase is a causal triangle plus the strictly upper triangles of its diagonal
blocks, and an upper triangle is a causal one with both axes reversed ("anticausal").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .blocks import Mask, Pass, Segments, pass_of
from .documents import Documents
from .layout import Layout
from .windows import window_passes


@dataclass(frozen=True, eq=False)
class Tile:
    """Everything the local queries of `query_rank` see of the local keys of `key_rank`.

    `passes` hold for batch row `blocks[:, ROW]`, or, when `documents` is None, for every batch row.
    """

    layout: Layout
    documents: Documents | None
    seq_len: int
    world_size: int
    query_rank: int
    key_rank: int
    window: int | None
    passes: tuple[Pass, ...]

    @property
    def pairs(self) -> int:
        """Visible pairs summed over the batch rows of `documents` (one row when it is None)."""
        return sum(p.pairs for p in self.passes)


# Enough for the microbatches a pipeline schedule keeps in flight, plus validation.
@lru_cache(maxsize=64)
def tiles_of_rank(
    layout: Layout,
    seq_len: int,
    world_size: int,
    rank: int,
    documents: Documents | None = None,
    window: int | None = None,
) -> tuple[Tile, ...]:
    """The P tiles of query rank p in ring order: in step t, the keys of rank (p - t) mod P.

    With a window (tokens that a token sees, itself included) only the first of them, up to the last
    step in which some rank of the ring sees a key: as many on every rank.

    Computed once per batch and reused by every layer, forward and backward: the result is cached
    by the boundaries' values.

    Raises:
        ValueError: S does not suit the layout, the layout has no windows, or documents do not end
            at S.
    """
    layout.check(seq_len, world_size)
    if documents is not None and documents.seq_len != seq_len:
        raise ValueError(
            f"documents end at {documents.seq_len}, but the sequence has {seq_len} tokens"
        )
    if window is not None and window >= seq_len:
        window = None
    steps = _steps(layout, seq_len, world_size, window)
    key_ranks = [(rank - step) % world_size for step in range(steps)]
    return tuple(
        Tile(
            layout,
            documents,
            seq_len,
            world_size,
            rank,
            key_rank,
            window,
            _passes(layout, seq_len, world_size, rank, key_rank, documents, window),
        )
        for key_rank in key_ranks
    )


@lru_cache(maxsize=64)
def _steps(layout: Layout, seq_len: int, world_size: int, window: int | None) -> int:
    """Ring steps in which some rank sees a key, were all of them one document."""
    if window is None:
        return world_size
    return 1 + max(
        step
        for step in range(world_size)
        for p in range(world_size)
        if _passes(layout, seq_len, world_size, p, (p - step) % world_size, None, window)
    )


def _passes(
    layout: Layout,
    seq_len: int,
    world_size: int,
    p: int,
    r: int,
    documents: Documents | None,
    window: int | None,
) -> tuple[Pass, ...]:
    if documents is None:
        row, start, end = (np.array([x], dtype=np.int64) for x in (0, 0, seq_len))
    else:
        boundaries = documents.boundaries.numpy()
        row, index = np.nonzero(np.diff(boundaries, axis=1))
        start, end = boundaries[row, index], boundaries[row, index + 1]

    def count(position: np.ndarray, rank: int) -> np.ndarray:
        return layout.count_before(position, seq_len, world_size, rank)

    q0, q1, k0 = count(start, p), count(end, p), count(start, r)
    if window is not None:
        queries, keys = (layout.runs(seq_len, world_size, rank) for rank in (p, r))
        segments = Segments(row, q0, q1, k0)
        passes = window_passes(segments, count(end, r), queries, keys, window)
    elif r == p:
        passes = [pass_of(Mask.CAUSAL, row, q0, q1 - q0, k0, q1 - q0)]
    else:
        passes = layout.passes(Segments(row, q0, q1, k0), seq_len, world_size, p, r)
    return tuple(x for x in passes if len(x.blocks))
