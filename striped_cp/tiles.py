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
from enum import Enum
from functools import lru_cache

import numpy as np

from .documents import Documents
from .layout import Layout, RunLayout, Striped

# Columns of `Pass.blocks`.
ROW, Q_START, Q_LEN, K_START, K_LEN, COUNT = range(6)


class Mask(Enum):
    """Which pairs of a block are visible; i, j count query and key rows inside the block."""

    FULL = "full"
    CAUSAL = "causal"  # square, j <= i
    ANTICAUSAL = "anticausal"  # square, j >= i


@dataclass(frozen=True, eq=False)
class Pass:
    """Blocks with one mask, disjoint in their query rows and disjoint in their key rows.

    Attributes:
        blocks: int64 (N, 6): batch row, query start, query length, key start, key length, count.
            A block with count m stands for m equal blocks, both starts advancing by `stride` rows.
        stride: rows between the repeats of a block; 0 where every count is 1.
    """

    mask: Mask
    blocks: np.ndarray
    stride: int = 0

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, the unit of attention work."""
        q, k, count = self.blocks[:, Q_LEN], self.blocks[:, K_LEN], self.blocks[:, COUNT]
        return int((count * (q * k if self.mask is Mask.FULL else q * (q + 1) // 2)).sum())


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
    passes: tuple[Pass, ...]

    @property
    def pairs(self) -> int:
        """Visible pairs summed over the batch rows of `documents` (one row when it is None)."""
        return sum(p.pairs for p in self.passes)


# Enough for the microbatches a pipeline schedule keeps in flight, plus validation.
@lru_cache(maxsize=64)
def tiles_of_rank(
    layout: Layout, seq_len: int, world_size: int, rank: int, documents: Documents | None = None
) -> tuple[Tile, ...]:
    """The P tiles of query rank p in ring order: in step t, the keys of rank (p - t) mod P.

    Computed once per batch and reused by every layer, forward and backward: the result is cached
    by the boundaries' values.

    Raises:
        ValueError: S does not suit the layout, or documents do not end at S.
    """
    layout.check(seq_len, world_size)
    if documents is not None and documents.seq_len != seq_len:
        raise ValueError(
            f"documents end at {documents.seq_len}, but the sequence has {seq_len} tokens"
        )
    key_ranks = [(rank - step) % world_size for step in range(world_size)]
    return tuple(
        Tile(
            layout,
            documents,
            seq_len,
            world_size,
            rank,
            key_rank,
            _passes(layout, seq_len, world_size, rank, key_rank, documents),
        )
        for key_rank in key_ranks
    )


def _passes(
    layout: Layout, seq_len: int, world_size: int, p: int, r: int, documents: Documents | None
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
    if r == p:
        passes = [_pass(Mask.CAUSAL, row, q0, q1 - q0, k0, q1 - q0)]
    elif isinstance(layout, Striped):
        passes = _staircase(row, q0, q1, k0, layout.block_size, key_first=r < p)
    else:
        assert isinstance(layout, RunLayout)
        runs = layout.runs(seq_len, world_size, p)
        passes = _rectangles(
            row, q0, q1, k0, runs, [layout.count_before(s, seq_len, world_size, r) for s, _ in runs]
        )
    return tuple(x for x in passes if len(x.blocks))


def _pass(
    mask: Mask,
    row: np.ndarray,
    q_start: np.ndarray,
    q_len: np.ndarray,
    k_start: np.ndarray,
    k_len: np.ndarray,
    count: np.ndarray | int = 1,
    stride: int = 0,
) -> Pass:
    """A pass of the blocks that are not empty."""
    columns = np.broadcast_arrays(row, q_start, q_len, k_start, k_len, count)
    keep = (columns[Q_LEN] > 0) & (columns[K_LEN] > 0) & (columns[COUNT] > 0)
    return Pass(mask, np.stack([c[keep] for c in columns], axis=1), stride)


def _staircase(
    row: np.ndarray, q0: np.ndarray, q1: np.ndarray, k0: np.ndarray, block: int, key_first: bool
) -> list[Pass]:
    """Stripes of `block` tokens, p != r: local row i sees keys [k0, i // block * block + reach).

    A document may begin inside a key block and end inside a query block. Cutting off these partial
    blocks leaves a staircase of whole blocks:

        head: rows that see the partial first key block [k0, k_aligned), all of them fully
        steps: `side` x `side` staircase from (q_aligned, k_aligned)
        tail: rows of the partial last query block, which see whole key blocks

    For block = 1 nothing is partial and what remains is one causal square per document: with
    c = q0 - k0 - [r > p], either 0 or -1, a document of L queries has a square of L + c.
    """
    reach = block if key_first else 0
    k_aligned = -(-k0 // block) * block
    q_aligned = k_aligned + block - reach  # the first row that sees a whole aligned key block
    q_end = np.maximum(q1 // block * block, q_aligned)  # where whole query blocks end
    side = q_end - q_aligned

    head_q = np.maximum(q0, k_aligned - reach)
    head = _pass(Mask.FULL, row, head_q, q1 - head_q, k0, k_aligned - k0)
    tail = _pass(Mask.FULL, row, q_end, q1 - q_end, k_aligned, q_end + reach - k_aligned)
    if block == 1:
        return [_pass(Mask.CAUSAL, row, q_aligned, side, k_aligned, side)]

    single = side == block  # one step: the triangle and its complement are one full square
    several = np.where(single, 0, side)
    return [
        _pass(Mask.CAUSAL, row, q_aligned, several, k_aligned, several),
        _pass(
            Mask.ANTICAUSAL,
            row,
            q_aligned,
            np.full_like(side, block - 1),
            k_aligned + 1,
            np.full_like(side, block - 1),
            count=several // block,
            stride=block,
        ),
        _pass(Mask.FULL, row, q_aligned, side * single, k_aligned, side * single),
        head,
        tail,
    ]


def _rectangles(
    row: np.ndarray,
    q0: np.ndarray,
    q1: np.ndarray,
    k0: np.ndarray,
    runs: list[tuple[int, int]],
    k_ends: list[int],
) -> list[Pass]:
    """Layouts of a few runs, p != r: a whole query run sees the same keys [k0, k_end), fully."""
    passes = []
    first = 0
    last = 0
    for i, (_, length) in enumerate(runs):
        last += length
        if i + 1 < len(runs) and k_ends[i + 1] == k_ends[i]:
            continue  # the next run sees the same keys: one taller rectangle
        top, bottom = np.maximum(q0, first), np.minimum(q1, last)
        passes.append(_pass(Mask.FULL, row, top, bottom - top, k0, k_ends[i] - k0))
        first = last
    return passes
