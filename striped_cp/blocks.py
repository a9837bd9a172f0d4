"""Blocks: the rectangles and triangles that a tile of the ring is made of, in integers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
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
