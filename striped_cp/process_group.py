"""The ring of a process group: neighbours talk over torch.distributed, on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .ring import Buffers, Pending, Ring

# Its name up to torch 2.12.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupRing(Ring):
    """The ring of a process group, over asynchronous point-to-point operations.

    Args:
        buffers: receive buffers to use and to add to, so that they outlive this object.
    """

    def __init__(self, group: dist.ProcessGroup, buffers: Buffers | None = None) -> None:
        super().__init__(group.rank(), group.size(), buffers)
        self.group = group

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], distance: int = 1
    ) -> Pending:
        to, source = ((self.rank + x) % self.world_size for x in (distance, -distance))
        # group_peer: ranks of this group, which need not be contiguous in the world.
        ops = [dist.P2POp(dist.isend, x, group=self.group, group_peer=to) for x in send]
        ops += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=source) for x in receive]
        return _Works(dist.batch_isend_irecv(ops), self, (source, to))

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        # flatten: gloo wants the gathered pieces concatenated, not stacked.
        work = all_gather_single(out.flatten(0, 1), x, group=self.group, async_op=True)
        return _Works([work], self)

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        work = dist.all_to_all_single(out, x, group=self.group, async_op=True)
        return _Works([work], self)

    def members(self) -> list[int]:
        """Ranks of the job, in the order of the ring."""
        return dist.get_process_group_ranks(self.group)

    def _limit(self) -> tuple[timedelta, ...]:
        """What to wait with: for gloo the group's present time limit.

        Its sends and receives keep the limit that their group was made with (torch 2.13). With NCCL
        a limit would make the host wait for the device; its watchdog knows the present one.
        """
        if dist.get_backend(self.group) != "gloo":
            return ()
        return (self.group._get_backend(torch.device("cpu")).options._timeout,)


class _Works(NamedTuple):
    """What is under way; its errors name the ranks that this one waited for.

    Attributes:
        neighbours: of a hop, the ranks of the ring before and after this one.
    """

    works: list[Any]
    ring: ProcessGroupRing
    neighbours: tuple[int, int] | None = None

    def wait(self) -> None:
        limit = self.ring._limit()
        try:
            for work in self.works:
                work.wait(*limit)
        except RuntimeError as error:
            raise RuntimeError(f"ring: {self._waited()}: {error}") from error

    def _waited(self) -> str:
        members = self.ring.members()
        who = f"rank {members[self.ring.rank]} waited for"
        if self.neighbours is None:
            return f"{who} one of the ranks {members}"
        before, after = (members[x] for x in self.neighbours)
        return f"{who} keys from rank {before} and for rank {after} to take its own"
