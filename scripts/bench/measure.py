"""Clocks, peak memory, and the yardsticks of every run: the ideal, a causal and a full tile."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from striped_cp import Contiguous
from striped_cp.kernels.base import BackwardInputs, Inputs, Partial
from striped_cp.merge import OutputAccumulator
from striped_cp.tiles import Tile, tiles_of_rank

from .case import Case


class Timing(NamedTuple):
    """Seconds of one forward and one backward."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


def median(timings: Sequence[Timing]) -> Timing:
    return Timing(
        statistics.median(t.forward for t in timings),
        statistics.median(t.backward for t in timings),
    )


def spread(timings: Sequence[Timing]) -> float:
    """(slowest - fastest) / median, of the totals."""
    totals = [t.total for t in timings]
    return (max(totals) - min(totals)) / statistics.median(totals)


Clock = Callable[[], float]


def wall_clock(device: str) -> Clock:
    """Seconds, once the device has finished what was asked of it."""

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return now


def device_clock(device: str) -> Clock:
    """Seconds that the device worked for this thread: what others do on the CPU does not count."""
    return time.thread_time if device == "cpu" else wall_clock(device)


def one_thread(device: str) -> None:
    """One CPU thread per rank, so that a rank is a fixed amount of hardware."""
    if device == "cpu":
        torch.set_num_threads(1)


def peak_memory(device: str, run: Callable[[], object]) -> int:
    """Bytes that `run` holds at its peak beyond what was allocated before."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler announces itself
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    events = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes), default=0)


class Yardsticks:
    """The kernel alone, nothing merged or summed: what a ring's time is compared with."""

    def __init__(self, case: Case, now: Clock) -> None:
        self.case, self.now = case, now
        self.kernel = case.chosen_kernel()
        self.tensors = case.tensors(case.seq_len)
        self.sequence = case.tiles(Contiguous(), 1, 0)[0]
        # In a contiguous ring of two, rank 1 sees itself causally and rank 0 fully.
        self.rows = case.seq_len // case.world_size
        self.causal, self.full = tiles_of_rank(Contiguous(), 2 * self.rows, 2, 1)

    def ideal(self) -> Timing:
        """The whole sequence, with the case's documents and window, on one device; divided by P."""
        forward, backward = self._time(self.tensors, self.sequence)
        return Timing(forward / self.case.world_size, backward / self.case.world_size)

    def causal_tile(self) -> Timing:
        return self._time([x[:, :, : self.rows] for x in self.tensors], self.causal)

    def full_tile(self) -> Timing:
        return self._time([x[:, :, : self.rows] for x in self.tensors], self.full)

    def _time(self, tensors: Sequence[Tensor], tile: Tile) -> Timing:
        query, key, value, grad_out = tensors
        case, kernel, now = self.case, self.kernel, self.now
        started = now()
        partials = list(kernel.forward(Inputs(query, key, value), tile, case.scale))
        forward = now() - started
        out, lse = _assembled(query, partials)
        del partials
        started = now()
        x = BackwardInputs(query, key, value, out, lse, grad_out)
        for _ in kernel.backward(x, tile, case.scale):
            pass
        return Timing(forward, now() - started)


def _assembled(query: Tensor, partials: list[Partial]) -> tuple[Tensor, Tensor]:
    """(out, lse) of a tile from its partial results."""
    total = OutputAccumulator(query)
    for partial in partials:
        total.add(partial)
    return total.out.to(query.dtype), total.lse


class Samples:
    """What a mode measured, one Timing per repeat; `peak` in bytes by layout.

    Attributes:
        ideal: all ranks computing it at once, like the ring.
        alone: one of them, the others waiting; empty where one process is all ranks.
    """

    def __init__(self, peak: dict[str, int]) -> None:
        self.peak = peak
        self.rings: dict[str, list[Timing]] = {name: [] for name in peak}
        self.ideal: list[Timing] = []
        self.alone: list[Timing] = []
        self.causal: list[Timing] = []
        self.full: list[Timing] = []

    def add_yardsticks(
        self,
        yardsticks: Yardsticks,
        slowest: Callable[[Callable[[], Timing]], Timing] = lambda measured: measured(),
    ) -> None:
        self.ideal.append(slowest(yardsticks.ideal))
        self.causal.append(slowest(yardsticks.causal_tile))
        self.full.append(slowest(yardsticks.full_tile))
