"""Blocks: the rectangles and triangles that a tile of the ring is made of, in integers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np

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
        blocks: int64 (N, 6): batch row, query start, query length, key start, key length, count;
            in the order of batch rows and query rows.
            A block with count m stands for m equal blocks, both starts advancing by `stride` rows.
        stride: rows between the repeats of a block; 0 where every count is 1.
        window: of causal blocks whose counts are 1: row i sees keys i - window < j <= i.
    """

    mask: Mask
    blocks: np.ndarray
    stride: int = 0
    window: int | None = None

    @property
    def triangular(self) -> bool:
        return self.mask is not Mask.FULL

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs, the unit of attention work."""
        q, k, count = self.blocks[:, Q_LEN], self.blocks[:, K_LEN], self.blocks[:, COUNT]
        each = causal_pairs(q, self.window) if self.triangular else q * k
        return int((count * each).sum())

    @cached_property
    def unwindowed(self) -> tuple[Pass, ...]:
        """The same pairs without a window, for kernels that have none.

        A band of width w is causal squares of side w, and beside each but the first the strictly
        upper triangle that its rows see of the keys before. The last square may be smaller; its
        rows then see a rectangle, too. For w = 3:

            x
            x x
            x x x
              / / x             x causal, the first of these passes: covers every row once
                / x x           / anticausal
                  x x x         o full
                    / o x
        """
        if self.window is None:
            return (self,)
        w = self.window
        row, q, length, k = self.blocks[:, [ROW, Q_START, Q_LEN, K_START]].T
        whole = length // w
        rest = length - whole * w
        beside = np.where(whole > 0, rest, 0)
        q_rest, k_rest = q + whole * w, k + whole * w
        k_seen = k_rest - w + 1  # the first key that the first row of the rest sees
        causal = pass_of(Mask.CAUSAL, row, q, w, k, w, whole, w)
        last = pass_of(Mask.CAUSAL, row, q_rest, rest, k_rest, rest)
        upper = pass_of(Mask.ANTICAUSAL, row, q + w, w - 1, k + 1, w - 1, whole - 1, w)
        last_upper = pass_of(Mask.ANTICAUSAL, row, q_rest, beside, k_seen, beside)
        passes = (
            _joined(causal, last),
            _joined(upper, last_upper),
            pass_of(Mask.FULL, row, q_rest, beside, k_seen + beside, w - 1 - beside),
        )
        return tuple(x for x in passes if len(x.blocks))


def causal_pairs(length: np.ndarray, window: int | None = None) -> np.ndarray:
    """Pairs among `length` tokens of which each sees itself and those before it, in the window."""
    hidden = 0 if window is None else np.maximum(length - window, 0)
    return (length * (length + 1) - hidden * (hidden + 1)) // 2


class Segments(NamedTuple):
    """Documents as a query rank and a key rank hold them: int64 arrays, one entry a document.

    Batch row `row`; local query rows `q0` to `q1`; `k0` the first of its local key rows.
    """

    row: np.ndarray
    q0: np.ndarray
    q1: np.ndarray
    k0: np.ndarray


def pass_of(
    mask: Mask,
    row: np.ndarray,
    q_start: np.ndarray,
    q_len: np.ndarray | int,
    k_start: np.ndarray,
    k_len: np.ndarray | int,
    count: np.ndarray | int = 1,
    stride: int = 0,
    window: int | None = None,
) -> Pass:
    """A pass of the blocks that are not empty, without the window if all of them fit into it."""
    columns = np.broadcast_arrays(row, q_start, q_len, k_start, k_len, count)
    keep = (columns[Q_LEN] > 0) & (columns[K_LEN] > 0) & (columns[COUNT] > 0)
    blocks = np.stack([c[keep] for c in columns], axis=1)
    if window is not None and blocks[:, Q_LEN].max(initial=0) <= window:
        window = None
    return Pass(mask, blocks, stride, window)


def _joined(a: Pass, b: Pass) -> Pass:
    """One pass of two, the second without repeats."""
    blocks = np.concatenate([a.blocks, b.blocks])
    return Pass(a.mask, blocks[np.lexsort((blocks[:, Q_START], blocks[:, ROW]))], a.stride)
