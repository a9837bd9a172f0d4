"""All ranks of a ring in one process on one device, a thread each.

The same algorithm as over a process group, for tests and measurements at any P.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from .ring import Pending, Ring

T = TypeVar("T")


def loopback(world_size: int, run: Callable[[LoopbackRing], T]) -> list[T]:
    """Call `run` on every rank of a ring of `world_size`; the results by rank."""
    shared = _Shared(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            with shared.turn:
                results[rank] = run(LoopbackRing(range(world_size), rank, shared))
        except threading.BrokenBarrierError:
            pass  # another rank failed first
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class _Shared:
    """What the ranks share.

    Attributes:
        turn: held by the one rank that computes. Ranks that entered torch.compile together would
            each compile a graph that one could compile for all.
    """

    def __init__(self, world_size: int) -> None:
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(world_size)
        self.sent: list[Sequence[Tensor]] = [()] * world_size

    def meet(self) -> None:
        """Wait for all ranks, and let them compute meanwhile."""
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


class LoopbackRing(Ring):
    """Some of the threads: `members[rank]` is this one. All threads make the same calls."""

    def __init__(self, members: Sequence[int], rank: int, shared: _Shared) -> None:
        super().__init__(rank, len(members))
        self.members = members
        self.shared = shared

    def split(self, ulysses_degree: int) -> tuple[LoopbackRing, LoopbackRing]:
        """This thread's ring and the axis inside it, of R x U ranks."""
        rank, part = divmod(self.rank, ulysses_degree)
        ring = self.members[part::ulysses_degree]
        inside = self.members[rank * ulysses_degree :][:ulysses_degree]
        return LoopbackRing(ring, rank, self.shared), LoopbackRing(inside, part, self.shared)

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], distance: int = 1
    ) -> Pending:
        def deliver(sent: list[Sequence[Tensor]]) -> None:
            for mine, theirs in zip(receive, sent[self.members[self.rank - distance]], strict=True):
                mine.copy_(theirs)

        return _Delivery(self, send, deliver)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        def deliver(sent: list[Sequence[Tensor]]) -> None:
            for rank, member in enumerate(self.members):
                (out[rank],) = sent[member]

        return _Delivery(self, (x,), deliver)

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        def deliver(sent: list[Sequence[Tensor]]) -> None:
            for rank, member in enumerate(self.members):
                (theirs,) = sent[member]
                out[rank] = theirs[self.rank]

        return _Delivery(self, (x,), deliver)


class _Delivery:
    """Ranks meet, copy what was sent to them, and meet again before anyone may overwrite it."""

    def __init__(
        self,
        ring: LoopbackRing,
        send: Sequence[Tensor],
        deliver: Callable[[list[Sequence[Tensor]]], None],
    ) -> None:
        self.ring, self.send, self.deliver = ring, send, deliver

    def wait(self) -> None:
        shared = self.ring.shared
        shared.sent[self.ring.members[self.ring.rank]] = self.send
        shared.meet()
        self.deliver(shared.sent)
        shared.meet()
