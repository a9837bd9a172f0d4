"""All tiles of a P-rank ring on one device, one rank after the other.

The ring's own code runs, with a clock in place of the network that stands still while a hop is
delivered. Ranks work in lock-step, so a ring takes the sum over steps of its slowest rank. On the
CPU the clock counts the time of its one thread, whatever else the machine is doing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from striped_cp import Layout, ulysses
from striped_cp.kernels.base import BackwardInputs, Inputs, Partial, PartialGradients, TileAttention
from striped_cp.ring import Pending, Ring
from striped_cp.tiles import Tile

from .case import Case
from .measure import Samples, Timing, Yardsticks, device_clock, one_thread, peak_memory

# Seconds by step, of one rank.
Steps = list[float]


class StepClock:
    """Seconds of every ring step of one rank."""

    def __init__(self, device: str) -> None:
        self.now = device_clock(device)
        self.steps: Steps = []

    def next_step(self) -> None:
        if self.steps:
            self._stop()
        self.steps.append(0.0)
        self._started = self.now()

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self.steps:
            self._stop()
        yield
        self._started = self.now()

    def finish(self) -> Steps:
        self._stop()
        steps, self.steps = self.steps, []
        return steps

    def _stop(self) -> None:
        self.steps[-1] += self.now() - self._started


class ClockKernel:
    """A kernel that tells the clock when the ring takes up its next tile."""

    def __init__(self, kernel: TileAttention, clock: StepClock) -> None:
        self.kernel, self.clock = kernel, clock

    def forward(self, x: Inputs, tile: Tile, scale: float) -> Iterator[Partial]:
        self.clock.next_step()
        return self.kernel.forward(x, tile, scale)

    def backward(self, x: BackwardInputs, tile: Tile, scale: float) -> Iterator[PartialGradients]:
        self.clock.next_step()
        return self.kernel.backward(x, tile, scale)


class ClockRing(Ring):
    """A rank whose neighbours hold what it holds itself; values do not change a tile's time."""

    def __init__(self, rank: int, world_size: int, clock: StepClock) -> None:
        super().__init__(rank, world_size)
        self.clock = clock

    def shift(
        self, send: Sequence[Tensor], receive: Sequence[Tensor], distance: int = 1
    ) -> Pending:
        with self.clock.paused():
            for sent, received in zip(send, receive, strict=True):
                received.copy_(sent)
        return _Delivered()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        with self.clock.paused():
            out.copy_(x.expand_as(out))
        return _Delivered()

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        with self.clock.paused():
            out.copy_(x)
        return _Delivered()


class _Delivered:
    def wait(self) -> None:
        pass


class VirtualRank:
    """One rank of a virtual ring, with its inputs."""

    def __init__(self, case: Case, layout: Layout, rank: int) -> None:
        self.case = case
        self.clock = StepClock(case.device)
        ring_rank, part = divmod(rank, case.ulysses)
        ring_size = case.world_size // case.ulysses
        self.tiles = case.tiles(layout, ring_size, ring_rank)
        self.kernel = ClockKernel(case.chosen_kernel(), self.clock)
        self.ring = ClockRing(ring_rank, ring_size, self.clock)
        self.axis = ClockRing(part, case.ulysses, self.clock)
        self.tensors = case.tensors(case.seq_len // case.world_size, rank)

    def run(self) -> tuple[Steps, Steps]:
        """Seconds of every step, forward and backward; before the first, of packing messages."""
        query, key, value, grad_out = self.tensors
        how = self.tiles, self.kernel, self.ring, self.case.scale, self.case.rotate_method
        self._pack()
        out, lse = ulysses.forward(Inputs(query, key, value), self.axis, *how)
        forward = self.clock.finish()
        self._pack()
        x = BackwardInputs(query, key, value, out, lse, grad_out)
        ulysses.backward(x, self.axis, *how)
        return forward, self.clock.finish()

    def _pack(self) -> None:
        if self.case.ulysses > 1:
            self.clock.next_step()


def measure(case: Case, layouts: dict[str, Layout], repeats: int) -> Samples:
    """Layouts take turns rank by rank, so that a drifting machine favours none."""
    one_thread(case.device)
    torch.compiler.reset()  # which gives up after some shapes of a function
    yardsticks = Yardsticks(case, device_clock(case.device))
    last = case.world_size - 1
    peak = {
        name: peak_memory(case.device, VirtualRank(case, layout, last).run)
        for name, layout in layouts.items()
    }
    samples = Samples(peak)
    # By layout: [repeat][rank][step].
    forward: dict[str, list[list[Steps]]] = {name: [] for name in layouts}
    backward: dict[str, list[list[Steps]]] = {name: [] for name in layouts}
    for _ in range(repeats):
        samples.add_yardsticks(yardsticks)
        for name in layouts:
            forward[name].append([])
            backward[name].append([])
        for rank in range(case.world_size):
            for name, layout in layouts.items():
                steps = VirtualRank(case, layout, rank).run()
                forward[name][-1].append(steps[0])
                backward[name][-1].append(steps[1])
    for name in layouts:
        samples.rings[name] = [
            Timing(_lockstep(f), _lockstep(b))
            for f, b in zip(forward[name], backward[name], strict=True)
        ]
    return samples


def _lockstep(ranks: list[Steps]) -> float:
    """Sum over steps of the slowest rank."""
    return sum(max(step) for step in zip(*ranks, strict=True))
