"""A ring: how one rank reaches its neighbours.

Over torch.distributed (process_group.py), or all P ranks as threads of one process (loopback.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Buffers = dict[tuple[str, int], Tensors]


class Pending(Protocol):
    """A hop under way; between the post and `wait` neither end may be touched."""

    def wait(self) -> None: ...


class Ring(ABC):
    """One rank's end of the ring.

    Tensors passed in are contiguous, of the same shapes and dtypes on all ranks, and all ranks make
    the same calls in the same order.
    """

    def __init__(self, rank: int, world_size: int, buffers: Buffers | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._buffers: Buffers = {} if buffers is None else buffers

    @abstractmethod
    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], distance: int = 1
    ) -> Pending:
        """Post a hop: `send` to rank + distance, `receive` filled from rank - distance."""

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """Post out[r] = x of rank r; out (P, *x.shape)."""

    @abstractmethod
    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        """Post out[r] = x[own rank] of rank r; both (P, ...)."""

    def buffers(self, role: str, slot: int, like: Sequence[Tensor]) -> Tensors:
        """Receive buffers, the same ones in every ring step of every layer."""
        held = self._buffers.get((role, slot))
        if held is None or any(
            (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device)
            for a, b in zip(held, like, strict=True)
        ):
            held = self._buffers[role, slot] = tuple(torch.empty_like(x) for x in like)
        return held


class SingleRing(Ring):
    """A ring of one rank: nothing travels."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], distance: int = 1
    ) -> Pending:
        raise AssertionError("a ring of one rank has no neighbours")

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        raise AssertionError("a ring of one rank has nothing to gather")

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        raise AssertionError("a ring of one rank has nothing to exchange")
