"""Layouts: which rank of the ring holds which token, and what that lets a rank see of another.

Every layout is monotone: a rank stores its tokens in sequence order, so causality inside one rank
is plain local order, and "how many of rank r's tokens come before position x" (`count_before`)
answers every visibility question. Integers only: no attention, no communication.

    S = 12, P = 3          rank 0         rank 1         rank 2
    Striped(1)             0 3 6 9        1 4 7 10       2 5 8 11
    Striped(2)             0 1 6 7        2 3 8 9        4 5 10 11
    HeadTail()             0 1 10 11      2 3 8 9        4 5 6 7
    Contiguous()           0 1 2 3        4 5 6 7        8 9 10 11

A layout is one class: a frozen dataclass with a `name`, `divisor` and `_positions`; nothing else
lists it. One whose tiles have few blocks that the general `passes` does not find says so itself,
and one that can have sliding windows has `runs`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from .blocks import Mask, Pass, Segments, pass_of

if TYPE_CHECKING:
    import torch

IntOrArray = TypeVar("IntOrArray", int, np.ndarray)

LAYOUTS: dict[str, type[Layout]] = {}


@dataclass(frozen=True)
class Layout(ABC):
    """Assignment of S sequence positions to P ranks, S/P positions each.

    Fields of a layout are integers; with `name` they are its `spec`.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        LAYOUTS[cls.name] = cls

    @abstractmethod
    def divisor(self, world_size: int) -> int:
        """What the sequence length must be a multiple of, on a ring of so many ranks."""

    @abstractmethod
    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray:
        """Global position of every local token: int64 (S/P,), strictly increasing."""

    def count_before(
        self, position: IntOrArray, seq_len: int, world_size: int, rank: int
    ) -> IntOrArray:
        """Number of `rank`'s tokens whose global position is below `position`, 0 to S."""
        counts = np.searchsorted(self._positions(seq_len, world_size, rank), position)
        return counts if isinstance(position, np.ndarray) else int(counts)

    def passes(
        self, segments: Segments, seq_len: int, world_size: int, query_rank: int, key_rank: int
    ) -> list[Pass]:
        """What the queries of one rank see of the keys of another, query_rank != key_rank.

        Of any layout: query rows in turn that see the same keys are a rectangle. Few, where ranks
        hold long runs of positions.
        """
        row, q0, q1, k0 = segments
        positions = self._positions(seq_len, world_size, query_rank)
        k_ends = self.count_before(positions, seq_len, world_size, key_rank)
        tops = np.flatnonzero(np.diff(k_ends, prepend=-1))
        passes = []
        for top, bottom in zip(tops, [*tops[1:], len(k_ends)], strict=True):
            first, last = np.maximum(q0, top), np.minimum(q1, bottom)
            passes.append(pass_of(Mask.FULL, row, first, last - first, k0, k_ends[top] - k0))
        return passes

    def runs(self, seq_len: int, world_size: int, rank: int) -> list[range]:
        """A rank's positions as evenly spaced runs, one, or a few of step 1: what a window needs.

        Between two runs of a step, what a window shows is a band (windows.py).

        Raises:
            ValueError: the layout has no such runs, and so no windows.
        """
        raise ValueError(
            f"layout = {self.spec!r} has no sliding windows: allowed with a window are "
            "'striped:1', 'headtail' and 'contiguous'"
        )

    @property
    def spec(self) -> str:
        """The layout as a string, the form in which it passes through a custom op."""
        return ":".join([self.name, *(str(getattr(self, field.name)) for field in fields(self))])

    def positions(
        self, seq_len: int, world_size: int, rank: int, ulysses_degree: int = 1
    ) -> torch.Tensor:
        """Global position of every local token: int64, shape (S/P,), strictly increasing.

        Args:
            world_size: P.
            ulysses_degree: U; rank r U + u holds the u-th of U parts of what rank r holds of a ring
                of P/U (ulysses.py).

        Raises:
            ValueError: `seq_len` cannot be laid out, or `rank` is no rank of the ring.
        """
        import torch  # late: lengths are checked, and runs planned, without it

        self.check(seq_len, world_size, ulysses_degree)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not in a ring of {world_size}: 0 to {world_size - 1}")
        ring_rank, part = divmod(rank, ulysses_degree)
        stripe = self._positions(seq_len, world_size // ulysses_degree, ring_rank)
        local = seq_len // world_size
        return torch.from_numpy(stripe[part * local : (part + 1) * local])

    def length_divisor(self, world_size: int, ulysses_degree: int = 1) -> int:
        """What the sequence length must be a multiple of, on P ranks of which U share heads."""
        return math.lcm(self.divisor(world_size // ulysses_degree), world_size)

    def check(self, seq_len: int, world_size: int, ulysses_degree: int = 1) -> None:
        """Raise ValueError unless `seq_len` can be laid out over `world_size` ranks."""
        if world_size % ulysses_degree:
            raise ValueError(f"ulysses_degree {ulysses_degree} does not divide {world_size} ranks")
        divisor = self.length_divisor(world_size, ulysses_degree)
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

    name: ClassVar[str] = "striped"
    block_size: int = 1

    def __post_init__(self) -> None:
        if type(self.block_size) is not int or self.block_size < 1:
            raise ValueError(f"block_size = {self.block_size!r}: must be an integer, at least 1")

    def divisor(self, world_size: int) -> int:
        return world_size * self.block_size

    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray:
        local = np.arange(seq_len // world_size, dtype=np.int64)
        block, inside = local // self.block_size, local % self.block_size
        return (block * world_size + rank) * self.block_size + inside

    def runs(self, seq_len: int, world_size: int, rank: int) -> list[range]:
        if self.block_size > 1:
            return super().runs(seq_len, world_size, rank)
        return [range(rank, seq_len, world_size)]

    def count_before(
        self, position: IntOrArray, seq_len: int, world_size: int, rank: int
    ) -> IntOrArray:
        cycle = world_size * self.block_size
        inside = np.clip(position % cycle - rank * self.block_size, 0, self.block_size)
        return position // cycle * self.block_size + inside

    def passes(
        self, segments: Segments, seq_len: int, world_size: int, query_rank: int, key_rank: int
    ) -> list[Pass]:
        """A staircase: local row i sees keys [k0, i // block * block + reach).

        A document may begin inside a key block and end inside a query block. Cutting off these
        partial blocks leaves a staircase of whole blocks:

            head: rows that see the partial first key block [k0, k_aligned), all of them fully
            steps: `side` x `side` staircase from (q_aligned, k_aligned)
            tail: rows of the partial last query block, which see whole key blocks

        For block = 1 nothing is partial and what remains is one causal square per document: with
        c = q0 - k0 - [r > p], either 0 or -1, a document of L queries has a square of L + c.
        """
        row, q0, q1, k0 = segments
        block = self.block_size
        reach = block if key_rank < query_rank else 0
        k_aligned = -(-k0 // block) * block
        q_aligned = k_aligned + block - reach  # the first row that sees a whole aligned key block
        q_end = np.maximum(q1 // block * block, q_aligned)  # where whole query blocks end
        side = q_end - q_aligned

        head_q = np.maximum(q0, k_aligned - reach)
        head = pass_of(Mask.FULL, row, head_q, q1 - head_q, k0, k_aligned - k0)
        tail = pass_of(Mask.FULL, row, q_end, q1 - q_end, k_aligned, q_end + reach - k_aligned)
        if block == 1:
            return [pass_of(Mask.CAUSAL, row, q_aligned, side, k_aligned, side)]

        single = side == block  # one step: the triangle and its complement are one full square
        several = np.where(single, 0, side)
        rest = np.full_like(side, block - 1)
        return [
            pass_of(Mask.CAUSAL, row, q_aligned, several, k_aligned, several),
            pass_of(
                Mask.ANTICAUSAL,
                row,
                q_aligned,
                rest,
                k_aligned + 1,
                rest,
                count=several // block,
                stride=block,
            ),
            pass_of(Mask.FULL, row, q_aligned, side * single, k_aligned, side * single),
            head,
            tail,
        ]


TOKEN_STRIPES = Striped()


@dataclass(frozen=True)
class HeadTail(Layout):
    """Rank r holds chunk r and chunk 2P-1-r of 2P chunks ("zigzag").

    When 2P does not divide S, the first P chunks are one token longer than the last P.
    """

    name: ClassVar[str] = "headtail"

    def divisor(self, world_size: int) -> int:
        return world_size

    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray:
        runs = self.runs(seq_len, world_size, rank)
        return np.concatenate([np.arange(x.start, x.stop, dtype=np.int64) for x in runs])

    def runs(self, seq_len: int, world_size: int, rank: int) -> list[range]:
        tail = seq_len // world_size // 2
        head = seq_len // world_size - tail
        tail_start = world_size * head + (world_size - 1 - rank) * tail
        return [range(rank * head, (rank + 1) * head), range(tail_start, tail_start + tail)]


@dataclass(frozen=True)
class Contiguous(Layout):
    """Rank r holds the r-th of P equal chunks (Ring Attention, arXiv 2310.01889)."""

    name: ClassVar[str] = "contiguous"

    def divisor(self, world_size: int) -> int:
        return world_size

    def _positions(self, seq_len: int, world_size: int, rank: int) -> np.ndarray:
        (run,) = self.runs(seq_len, world_size, rank)
        return np.arange(run.start, run.stop, dtype=np.int64)

    def runs(self, seq_len: int, world_size: int, rank: int) -> list[range]:
        length = seq_len // world_size
        return [range(rank * length, (rank + 1) * length)]


def layout_from_spec(spec: str) -> Layout:
    """Inverse of `Layout.spec`; a field that is left out has its default: "striped" is "striped:1".

    Raises:
        ValueError: no such layout.
    """
    name, *values = spec.split(":")
    layout = LAYOUTS.get(name)
    if layout is None or len(values) > len(fields(layout)) or not all(map(str.isdecimal, values)):
        allowed = [
            name + "".join(f"[:{field.name.upper()}]" for field in fields(each))
            for name, each in LAYOUTS.items()
        ]
        raise ValueError(f"layout {spec!r}: allowed are {', '.join(allowed)}")
    return layout(*map(int, values))
