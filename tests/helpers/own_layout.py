"""A layout as a user would add one: a class, which nothing else lists."""

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
