"""Layouts as a user would add them: classes, which nothing else lists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from striped_cp import Layout


@dataclass(frozen=True)
class Snake(Layout):
    """Stripes of `width` tokens dealt to the ranks in turn, every second time in reverse order."""

    name: ClassVar[str] = "snake"
    width: int = 1

    def divisor(self, world_size: int) -> int:
        return world_size * self.width

    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray:
        local = np.arange(seq_len // world_size, dtype=np.int64)
        turn, inside = local // self.width, local % self.width
        place = np.where(turn % 2, world_size - 1 - rank, rank)
        return (turn * world_size + place) * self.width + inside


@dataclass(frozen=True)
class Rounds(Layout):
    """The first half of the sequence dealt out in equal chunks, then the second; with windows."""

    name: ClassVar[str] = "rounds"

    def divisor(self, world_size: int) -> int:
        return 2 * world_size

    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray:
        return np.concatenate([np.array(x) for x in self.runs(seq_len, world_size, rank)])

    def runs(self, seq_len: int, world_size: int, rank: int) -> list[range]:
        chunk = seq_len // world_size // 2
        starts = (rank * chunk, seq_len // 2 + rank * chunk)
        return [range(start, start + chunk) for start in starts]
