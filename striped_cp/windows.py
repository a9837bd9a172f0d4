"""What a sliding window shows of a tile: bands of rows, in integers.

In a window of w a token sees itself and the w - 1 tokens before it. Between a run of query rows and
a run of key rows, both of step s and D apart at local rows 0, that is a band of local rows:

    0 <= (i - j) s + D < w        lowest <= i - j <= highest

Token stripes, P = 2, w = 4: rank 0 holds tokens 0 2 4 6 8, rank 1 holds 1 3 5 7 9.

    q on rank 1, k on rank 0      q on rank 0, k on rank 1
         0 2 4 6 8                     1 3 5 7 9
      1  x                          0  .
      3  x x                        2  x
      5    x x                      4  x x            causal on q[1:], k[:-1], as without a window,
      7      x x                    6    x x          and of that a local window of two rows
      9        x x                  8      x x
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from .blocks import Mask, Pass, Segments, pass_of


def window_passes(
    segments: Segments,
    k1: np.ndarray,
    queries: Sequence[range],
    keys: Sequence[range],
    window: int,
) -> list[Pass]:
    """What the queries of one rank see of the keys of one rank in a window.

    Causal passes come first: on the diagonal tile they cover every row once.

    Args:
        segments: documents; `k1` the ends of their local key rows.
        queries, keys: `Layout.runs` of the two ranks.
    """
    passes = []
    # Pairs of runs that have neither query rows nor key rows in common share passes.
    for shift in sorted(range(1 - len(keys), len(queries)), key=abs):
        bands = [
            _band(segments, k1, q, k, window)
            for a, q in enumerate(_placed(queries))
            for b, k in enumerate(_placed(keys))
            if a - b == shift
        ]
        columns = [np.concatenate(parts) for parts in zip(*bands, strict=True)]
        order = np.lexsort((columns[1], columns[0]))  # by batch row and query row, as in every pass
        passes += _passes(_Band(*(column[order] for column in columns)))
    return passes


class _Run(NamedTuple):
    """Local rows `first` to `end` of a rank; row i has position `origin` + `step` i."""

    first: int
    end: int
    origin: int
    step: int


class _Band(NamedTuple):
    """Of query rows q0 to q1 and key rows k0 to k1 those with lowest <= i - j <= highest.

    int64 arrays, one entry for each document and pair of runs.
    """

    row: np.ndarray
    q0: np.ndarray
    q1: np.ndarray
    k0: np.ndarray
    k1: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray


def _placed(runs: Sequence[range]) -> list[_Run]:
    ends = list(accumulate(map(len, runs)))
    return [
        _Run(end - len(run), end, run.start - (end - len(run)) * run.step, run.step)
        for run, end in zip(runs, ends, strict=True)
    ]


def _band(segments: Segments, k1: np.ndarray, q: _Run, k: _Run, window: int) -> _Band:
    row, q0, q1, k0 = segments
    distance = q.origin - k.origin
    lowest, highest = -(distance // q.step), (window - 1 - distance) // q.step
    # Of the rows in question those that see a key.
    q0 = np.maximum(np.maximum(q0, q.first), np.maximum(k0, k.first) + lowest)
    q1 = np.minimum(np.minimum(q1, q.end), np.minimum(k1, k.end) + highest)
    k0, k1 = np.maximum(k0, k.first), np.minimum(k1, k.end)
    some = (q0 < q1) & (k0 < k1) & (lowest <= highest)
    columns = np.broadcast_arrays(row, q0, q1, k0, k1, lowest, highest)
    return _Band(*(column[some] for column in columns))


def _passes(band: _Band) -> list[Pass]:
    """The band as passes: a causal square, and what rows see of keys before the square.

    Rows from `split` on come after all keys: their square has no rows.
    """
    row, q0, q1, _, k1, lowest, highest = band
    if not len(row):
        return []
    (width,) = {*(highest - lowest + 1).tolist()}
    split = np.clip(k1 + lowest, q0, q1)
    square = split - q0
    return [
        pass_of(Mask.CAUSAL, row, q0, square, q0 - lowest, square, window=width),
        *_earlier_keys(band._replace(q1=split, k1=q0 - lowest)),
        *_earlier_keys(band._replace(q0=split)),
    ]


def _earlier_keys(band: _Band) -> list[Pass]:
    """Of a band whose keys all come before its queries: j >= i - highest.

    q0   o o o      o full, rows before `first`
         o o o
    first  / o      / anticausal
             / o    o full
    last       .
    """
    row, q0, q1, k0, k1, _, highest = band
    first = np.clip(k0 + highest + 1, q0, q1)  # row that does not see the first key any more
    last = np.minimum(q1, k1 + highest)
    side = last - first
    return [
        pass_of(Mask.FULL, row, q0, first - q0, k0, k1 - k0),
        pass_of(Mask.ANTICAUSAL, row, first, side, first - highest, side),
        pass_of(Mask.FULL, row, first, side, last - highest, k1 - (last - highest)),
    ]
