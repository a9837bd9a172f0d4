"""The two ways in which keys and values come to the queries, and their gradients go home.

"ring": they hop from rank to rank. The next hop is posted before the tile's kernel starts, so it
travels while the kernel runs; dK, dV travel behind their keys, in float32, one hop after each tile,
and are home after P hops. Where a window ends the ring after fewer steps, the last hop takes them
home at once.

    step          0        1        2                    hops in a step
    rank 0     k0 v0    k2 v2    k1 v1     forward       k v
    rank 1     k1 v1    k0 v0    k2 v2     backward      k v (P - 1 times), dk dv (P times)
    rank 2     k2 v2    k1 v1    k0 v0

"allgather": one collective brings all of them, one takes the gradients home.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .kernels.base import Region
from .merge import GradientAccumulator, empty_sequence_major
from .ring import Pending, Ring

# Rows of a tile's keys, and a block's dK and dV for them.
KeyGradients = tuple[Region, Tensor, Tensor]


class Gradients(Protocol):
    """dK and dV of the keys at hand in every ring step, on their way home."""

    def add(self, step: int, parts: Sequence[KeyGradients]) -> None:
        """Add this rank's share for the keys of `step`; called once in every step, in order."""

    def home(self) -> tuple[Tensor, ...]:
        """dK, dV of this rank's own keys, summed over all ranks: (B, Hkv, n, D)."""

    def close(self) -> None:
        """Leave nothing under way, also where a kernel failed."""


class Rotation(NamedTuple):
    """How keys and values travel, and their gradients with them.

    Attributes:
        keys_and_values: of (ring, k, v, steps), both contiguous (B, n, Hkv, D): those of ranks p,
            p - 1, ..., p - steps + 1, each while the next are on their way.
        gradients: of (ring, key, value, dtype, steps), key and value (B, Hkv, n, D).
    """

    keys_and_values: Callable[
        [Ring, Tensor, Tensor, int], Generator[tuple[Tensor, Tensor], None, None]
    ]
    gradients: Callable[[Ring, Tensor, Tensor, torch.dtype, int], Gradients]


def _hop(
    ring: Ring, k: Tensor, v: Tensor, steps: int
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """O(S/P) memory: the local keys and values and two buffers, one computed on, one arriving.

    A buffer fills again two steps later: what was yielded must be used up by the next step.
    """
    for step in range(steps - 1):
        arriving = ring.buffers("kv", step % 2, (k, v))
        pending = ring.shift((k, v), arriving)
        try:
            yield k, v
        finally:
            pending.wait()
        k, v = arriving
    yield k, v


def _gather(
    ring: Ring, k: Tensor, v: Tensor, steps: int
) -> Generator[tuple[Tensor, Tensor], None, None]:
    """One collective, O(S) memory; the local tile is computed while it runs."""
    if steps == 1:
        yield k, v
        return
    mine = torch.stack((k, v))
    everyone = mine.new_empty(ring.world_size, *mine.shape)
    pending = ring.all_gather(everyone, mine)
    try:
        yield k, v
    finally:
        pending.wait()
    for step in range(1, steps):
        k, v = everyone[(ring.rank - step) % ring.world_size]
        yield k, v


def _add(totals: Sequence[Tensor], parts: Sequence[KeyGradients], step: int) -> None:
    """Add the parts of a tile to dK and dV (B, Hkv, n, D)."""
    sums = [GradientAccumulator(total, empty=step == 0) for total in totals]
    for region, *gradients in parts:
        for total, part in zip(sums, gradients, strict=True):
            total.add(region, part)


class _TravellingGradients:
    """dK, dV of the keys at hand, O(S/P) memory.

    They arrive from the rank that held the keys before, grow by this rank's share and travel on:
    one buffer is sent while the other fills.
    """

    def __init__(
        self, ring: Ring, key: Tensor, value: Tensor, dtype: torch.dtype, steps: int
    ) -> None:
        self.ring = ring
        self.hops = steps if steps > 1 else 0
        mine = tuple(empty_sequence_major(x, dtype).transpose(1, 2) for x in (key, value))
        buffer = ring.buffers("dkv", 0, mine) if self.hops else ()
        # The two change places with every hop. The last one must arrive in memory of this call.
        self.current, self.other = (buffer, mine) if self.hops % 2 else (mine, buffer)
        self.pending: Pending | None = None

    def add(self, step: int, parts: Sequence[KeyGradients]) -> None:
        self.close()
        _add([x.transpose(1, 2) for x in self.current], parts, step)
        if self.hops:
            # After the last step: over the ranks that the keys did not come to.
            distance = 1 if step < self.hops - 1 else self.ring.world_size - step
            self.pending = self.ring.shift(self.current, self.other, distance)

    def close(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
            self.current, self.other = self.other, self.current

    def home(self) -> tuple[Tensor, ...]:
        self.close()
        return tuple(x.transpose(1, 2) for x in self.current)


class _GatheredGradients:
    """dK, dV of every rank's keys, O(S) memory, exchanged and summed at the end."""

    def __init__(
        self, ring: Ring, key: Tensor, value: Tensor, dtype: torch.dtype, steps: int
    ) -> None:
        self.ring, self.steps = ring, steps
        self.parts = [
            x.new_zeros(ring.world_size, *x.transpose(1, 2).shape, dtype=dtype)
            for x in (key, value)
        ]

    def add(self, step: int, parts: Sequence[KeyGradients]) -> None:
        owner = (self.ring.rank - step) % self.ring.world_size
        _add([x[owner].transpose(1, 2) for x in self.parts], parts, step)

    def close(self) -> None:
        pass

    def home(self) -> tuple[Tensor, ...]:
        size, rank = self.ring.world_size, self.ring.rank
        totals = []
        while self.parts:
            parts = self.parts.pop(0)  # freed before the next are received
            if self.steps > 1:
                received = torch.empty_like(parts)
                self.ring.all_to_all(received, parts).wait()
                parts = received
            total = parts[rank].clone()  # not a view, which would keep all parts
            for step in range(1, self.steps):
                total += parts[(rank + step) % size]
            totals.append(total.transpose(1, 2))
        return tuple(totals)


ROTATIONS = {
    "ring": Rotation(_hop, _TravellingGradients),
    "allgather": Rotation(_gather, _GatheredGradients),
}
