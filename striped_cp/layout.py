"""Layouts: which rank of the ring holds which token of the sequence.

Every layout is monotone: a rank stores its tokens in sequence order, so causality inside one rank
is plain local order, and "how many of rank r's tokens come before position x" (`count_before`)
answers every visibility question. Integers only: no attention, no communication.

    S = 12, P = 3          rank 0         rank 1         rank 2
    Striped(1)             0 3 6 9        1 4 7 10       2 5 8 11
    Striped(2)             0 1 6 7        2 3 8 9        4 5 10 11
    HeadTail()             0 1 10 11      2 3 8 9        4 5 6 7
    Contiguous()           0 1 2 3        4 5 6 7        8 9 10 11
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)


@dataclass(frozen=True)
class Layout(ABC):
    """Assignment of S sequence positions to P ranks, S/P positions each."""

    @abstractmethod
    def divisor(self, world_size: int) -> int:
        """What the sequence length must be a multiple of."""

    @abstractmethod
    def count_before(
        self, position: IntOrArray, seq_len: int, world_size: int, rank: int
    ) -> IntOrArray:
        """Number of `rank`'s tokens whose global position is below `position`, 0 to S."""

    @abstractmethod
    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray: ...

    @property
    @abstractmethod
    def spec(self) -> str:
        """The layout as a string, the form in which it passes through a custom op."""

    def positions(self, seq_len: int, world_size: int, rank: int) -> torch.Tensor:
        """Global position of every local token: int64, shape (S/P,), strictly increasing.

        Raises:
            ValueError: `seq_len` is not a positive multiple of `divisor(world_size)`, or `rank` is
                no rank of the ring.
        """
        self.check(seq_len, world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a ring of {world_size}: 0 to {world_size - 1}")
        return torch.from_numpy(self._positions(seq_len, world_size, rank))

    def check(self, seq_len: int, world_size: int) -> None:
        """Raise ValueError unless `seq_len` can be laid out over `world_size` ranks."""
        divisor = self.divisor(world_size)
        if seq_len >= divisor and seq_len % divisor == 0:
            return
        below, above = seq_len // divisor * divisor, -(-seq_len // divisor) * divisor
        nearest = " or ".join(str(s) for s in sorted({below, max(above, divisor)}) if s > 0)
        raise ValueError(
            f"sequence length {seq_len} must be a positive multiple of {divisor} for layout "
            f"{self.spec!r} on {world_size} ranks; nearest: {nearest}"
        )


@dataclass(frozen=True)
class Striped(Layout):
    """Stripes of `block_size` tokens dealt to the ranks in turn (arXiv 2311.09431).

    Block b of the sequence lives on rank b mod P. With block_size = 1, token t lives on rank
    t mod P at local index t div P, and every tile of the ring is a causal square.
    """

    block_size: int = 1

    def __post_init__(self) -> None:
        if type(self.block_size) is not int or self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size!r}: must be an integer, at least 1")

    def divisor(self, world_size: int) -> int:
        return world_size * self.block_size

    def count_before(
        self, position: IntOrArray, seq_len: int, world_size: int, rank: int
    ) -> IntOrArray:
        cycle = world_size * self.block_size
        inside = np.clip(position % cycle - rank * self.block_size, 0, self.block_size)
        return position // cycle * self.block_size + inside

    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray:
        local = np.arange(seq_len // world_size, dtype=np.int64)
        block, inside = local // self.block_size, local % self.block_size
        return (block * world_size + rank) * self.block_size + inside

    @property
    def spec(self) -> str:
        return f"striped:{self.block_size}"


TOKEN_STRIPES = Striped()


@dataclass(frozen=True)
class RunLayout(Layout):
    """A layout in which every rank holds a few long runs of consecutive positions."""

    @abstractmethod
    def runs(self, seq_len: int, world_size: int, rank: int) -> list[tuple[int, int]]:
        """(first position, length) of every run, in sequence order."""

    def divisor(self, world_size: int) -> int:
        return world_size

    def count_before(
        self, position: IntOrArray, seq_len: int, world_size: int, rank: int
    ) -> IntOrArray:
        runs = self.runs(seq_len, world_size, rank)
        return sum(np.clip(position - start, 0, length) for start, length in runs)

    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray:
        runs = self.runs(seq_len, world_size, rank)
        return np.concatenate([np.arange(s, s + n, dtype=np.int64) for s, n in runs])


@dataclass(frozen=True)
class HeadTail(RunLayout):
    """Rank r holds chunk r and chunk 2P-1-r of 2P chunks ("zigzag").

    When 2P does not divide S, the first P chunks are one token longer than the last P.
    """

    def runs(self, seq_len: int, world_size: int, rank: int) -> list[tuple[int, int]]:
        tail = seq_len // world_size // 2
        head = seq_len // world_size - tail
        tail_start = world_size * head + (world_size - 1 - rank) * tail
        return [(rank * head, head), (tail_start, tail)]

    @property
    def spec(self) -> str:
        return "headtail"


@dataclass(frozen=True)
class Contiguous(RunLayout):
    """Rank r holds the r-th of P equal chunks (Ring Attention, arXiv 2310.01889)."""

    def runs(self, seq_len: int, world_size: int, rank: int) -> list[tuple[int, int]]:
        length = seq_len // world_size
        return [(rank * length, length)]

    @property
    def spec(self) -> str:
        return "contiguous"


def layout_from_spec(spec: str) -> Layout:
    """Inverse of `Layout.spec`; "striped" alone means stripes of one token.

    Raises:
        ValueError: no such layout.
    """
    name, colon, block_size = spec.partition(":")
    if name == "striped" and (block_size.isdecimal() or not colon):
        return Striped(int(block_size or 1))
    for layout in (HeadTail(), Contiguous()):
        if spec == layout.spec:
            return layout
    raise ValueError(
        f"layout {spec!r}: allowed are striped, striped:BLOCK_SIZE, headtail, contiguous"
    )
