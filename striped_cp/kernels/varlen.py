"""Variable-length calls: which rows of a pass go into which call, in integers.

Rows are counted packed: row i of batch row b is b * n + i. FlashAttention's kernel launches, for
each segment and head, as many blocks of 128 rows as the longest segment has, and its backward keeps
a float32 accumulator of 128 rows more for each segment. So long documents get calls of their own,
the short ones between them share one, and a call has few segments:

- a query row that sees nothing belongs to the segment after it: causal is aligned to the bottom
  right, so with one query more than keys the first one sees none;
- key rows that nobody sees are left out by selecting the others, and so are such query rows where
  the mask is full.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..blocks import COUNT, K_LEN, K_START, Q_LEN, Q_START, ROW, Mask, Pass

GRID = 128  # rows of a block of the kernel's grid
MOST_SEGMENTS = 65_535  # the second dimension of a grid
_MOST_LAUNCHED = (
    3  # blocks of the grid, for each one that has work; the long documents' come on top
)


_NONE = np.empty(0, np.int64)


class Call(NamedTuple):
    """Some blocks of a pass, computed by one call over consecutive rows.

    Attributes:
        queries, keys: first row and end.
        segments: int64 (N, 2), lengths of consecutive segments of query rows and of key rows, in
            the order in which rows are passed; None: one block, a dense call.
        query_rows, key_rows: int64, the rows that are passed, counted from the first in that order;
            None: all.
        idle: int64, query rows that are passed and see no key, counted likewise.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    segments: np.ndarray | None
    query_rows: np.ndarray | None
    key_rows: np.ndarray | None
    idle: np.ndarray


def calls_of(tile_pass: Pass, batch: int, rows: int) -> list[Call]:
    """Calls that compute every block of the pass over `batch` * `rows` packed rows.

    They have no query row in common, and no key row. Accumulators of a call have at most twice the
    rows of all batch rows, and room for 64 segments.
    """
    counts = tile_pass.blocks[:, COUNT]
    blocks = np.repeat(tile_pass.blocks, counts, axis=0)
    repeat = np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = blocks[:, ROW] * rows + repeat * tile_pass.stride
    q, k = blocks[:, Q_START] + offset, blocks[:, K_START] + offset
    borders = np.stack([q, q + blocks[:, Q_LEN], k, k + blocks[:, K_LEN]])
    most = max(GRID // 2, min(MOST_SEGMENTS, batch * rows // GRID))
    long = _long(blocks[:, Q_LEN])
    if batch > 1 and not long.any() and len(blocks) < most:
        everything = 0, batch * rows
        return [_shared(tile_pass.mask, borders, everything, everything)]
    calls = []
    for piece in _pieces(blocks[:, ROW], long, most):
        some = borders[:, piece]
        queries = int(some[0, 0]), int(some[1, -1])
        keys = int(some[2, 0]), int(some[3, -1])
        if long[piece[0]]:
            calls.append(Call(queries, keys, None, None, None, _NONE))
        else:
            calls.append(_shared(tile_pass.mask, some, queries, keys))
    return calls


def _long(lengths: np.ndarray) -> np.ndarray:
    """Which blocks are so much longer than others that a call for all would be mostly idle."""
    longest_first = np.sort(lengths)[::-1]
    needed = -(-longest_first // GRID)
    alone = np.cumsum(needed) - needed
    launched = alone + np.arange(len(lengths), 0, -1) * needed
    left = int(np.argmax(launched <= _MOST_LAUNCHED * needed.sum()))
    return lengths > longest_first[left]


def _pieces(row: np.ndarray, long: np.ndarray, most: int) -> list[np.ndarray]:
    """Indices of blocks that share a call: of one batch row, a long one alone, at most so many."""
    cut = (row[1:] != row[:-1]) | long[1:] | long[:-1]
    runs = np.split(np.arange(len(row)), np.flatnonzero(cut) + 1)
    return [run[i : i + most] for run in runs for i in range(0, len(run), most)]


def _shared(
    mask: Mask, borders: np.ndarray, queries: tuple[int, int], keys: tuple[int, int]
) -> Call:
    """The variable-length call of blocks, int64 (4, N): starts and ends of queries and keys."""
    if mask is Mask.ANTICAUSAL:  # rows are passed in reverse order, which makes a block causal
        q_start, q_end = sum(queries) - borders[[1, 0], ::-1]
        k_start, k_end = sum(keys) - borders[[3, 2], ::-1]
    else:
        q_start, q_end, k_start, k_end = borders
    lengths = np.stack([q_end - q_start, k_end - k_start], axis=1)
    query_rows = key_rows = None
    if lengths[:, 1].sum() != keys[1] - keys[0]:
        key_rows = _rows(k_start - keys[0], lengths[:, 1])
    if mask is Mask.FULL:
        if lengths[:, 0].sum() != queries[1] - queries[0]:
            query_rows = _rows(q_start - queries[0], lengths[:, 0])
        return Call(queries, keys, lengths, query_rows, key_rows, _NONE)
    before = np.append(queries[0], q_end[:-1])
    tail = queries[1] - q_end[-1]
    idle = _rows(np.append(before, q_end[-1]) - queries[0], np.append(q_start - before, tail))
    segments = np.append(lengths, [[tail, 0]] if tail else np.empty((0, 2), np.int64), axis=0)
    segments[: len(lengths), 0] += q_start - before
    return Call(queries, keys, segments, None, key_rows, idle)


def _rows(start: np.ndarray, length: np.ndarray) -> np.ndarray:
    """The rows of consecutive ranges."""
    before = np.cumsum(length) - length
    return np.repeat(start - before, length) + np.arange(length.sum())
