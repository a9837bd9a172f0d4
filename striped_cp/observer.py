"""Watching a ring: when its kernels compute, when it waits for a neighbour, what it sends.

`observe` puts an observer around the kernels and the hops of every ring in its scope. Without one,
rings run as they are: nothing is wrapped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from .kernels.base import Partial, PartialGradients, TileAttention
from .ring import Pending, Ring, Tensors

Span = Literal["attention", "wait"]


class RingObserver(Protocol):
    """Told by the thread that runs the ring; spans neither nest nor overlap."""

    def start(self, span: Span) -> None:
        """A kernel is about to run ("attention"), or the ring to wait for a hop ("wait")."""

    def stop(self, span: Span) -> None:
        """It has run; on a GPU: its work is in the queue of the current stream."""

    def send(self, size: int) -> None:
        """This rank posts `size` bytes to other ranks."""


# No context variable: the backward pass of CUDA tensors runs in a thread of autograd's own.
_observer: RingObserver | None = None


@contextlib.contextmanager
def observe(observer: RingObserver | None) -> Iterator[None]:
    """Let `observer` watch every ring of this process within the scope; None: nobody watches."""
    global _observer
    before, _observer = _observer, observer
    try:
        yield
    finally:
        _observer = before


def observed(
    rings: tuple[Ring, ...], kernel: TileAttention
) -> tuple[tuple[Ring, ...], TileAttention]:
    """Both, watched if there is an observer."""
    if _observer is None:
        return rings, kernel
    watched = tuple(_ObservedRing(ring, _observer) for ring in rings)
    return watched, _ObservedKernel(kernel, _observer)


class _ObservedKernel:
    def __init__(self, kernel: TileAttention, observer: RingObserver) -> None:
        self.kernel, self.observer = kernel, observer

    def forward(self, *args: Any) -> Iterator[Partial]:
        return self._watch(self.kernel.forward, args)

    def backward(self, *args: Any) -> Iterator[PartialGradients]:
        return self._watch(self.kernel.backward, args)

    def _watch(self, run: Callable[..., Iterator[Any]], args: tuple) -> Iterator[Any]:
        """Only the kernel's part of the time: between its results the ring merges them."""
        self.observer.start("attention")
        parts = run(*args)
        part = next(parts, None)
        self.observer.stop("attention")
        while part is not None:
            yield part
            part = None  # free before the next kernel call, as in the ring
            self.observer.start("attention")
            part = next(parts, None)
            self.observer.stop("attention")


class _ObservedRing(Ring):
    def __init__(self, ring: Ring, observer: RingObserver) -> None:
        super().__init__(ring.rank, ring.world_size)
        self.ring, self.observer = ring, observer

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], distance: int = 1
    ) -> Pending:
        self.observer.send(sum(x.nbytes for x in send))
        return _ObservedHop(self.ring.shift(send, receive, distance), self.observer)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        self.observer.send(x.nbytes * (self.world_size - 1))
        return _ObservedHop(self.ring.all_gather(out, x), self.observer)

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        self.observer.send(x.nbytes // self.world_size * (self.world_size - 1))
        return _ObservedHop(self.ring.all_to_all(out, x), self.observer)

    def buffers(self, role: str, slot: int, like: Sequence[Tensor]) -> Tensors:
        return self.ring.buffers(role, slot, like)


@dataclass(frozen=True)
class _ObservedHop:
    pending: Pending
    observer: RingObserver

    def wait(self) -> None:
        self.observer.start("wait")
        self.pending.wait()
        self.observer.stop("wait")
