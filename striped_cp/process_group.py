"""The ring of a process group: neighbours talk over torch.distributed, on gloo or NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

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
        return _Hop(dist.batch_isend_irecv(ops), self, source, to)

    def _gloo_limit(self) -> timedelta | None:
        """The present time limit of the group, if it is gloo's.

        Gloo's sends and receives keep the limit that their group was made with (torch 2.13). With
        NCCL a limit would make the host wait for the device; its watchdog knows the present one.
        """
        if dist.get_backend(self.group) != "gloo":
            return None
        return self.group._get_backend(torch.device("cpu")).options._timeout

    def members(self) -> list[int]:
        """Ranks of the job, in the order of the ring."""
        return dist.get_process_group_ranks(self.group)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        # flatten: gloo wants the gathered pieces concatenated, not stacked.
        return _Works([all_gather_single(out.flatten(0, 1), x, group=self.group, async_op=True)])

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        return _Works([dist.all_to_all_single(out, x, group=self.group, async_op=True)])


class _Works:
    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class _Hop(_Works):
    """A hop whose errors name the neighbours."""

    def __init__(self, works: list[Any], ring: ProcessGroupRing, source: int, to: int) -> None:
        super().__init__(works)
        self.ring, self.source, self.to = ring, source, to

    def wait(self) -> None:
        limit = self.ring._gloo_limit()
        try:
            for work in self.works:
                if limit is None:
                    work.wait()
                else:
                    work.wait(limit)
        except RuntimeError as error:
            members = self.ring.members()
            rank, before, after = (members[x] for x in (self.ring.rank, self.source, self.to))
            raise RuntimeError(
                f"ring: rank {rank} waited for keys from rank {before} and for rank "
                f"{after} to take its own: {error}"
            ) from error
