"""How long a rank's ring computes and waits in one step, and how the ranks compare.

A rank with less to compute waits for the others in every hop: its wait looks like communication. So
balance is judged by what the ranks compute, and what communication really costs by the wait of the
rank that waits least.
"""

import time
from abc import abstractmethod
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from recipes.metrics.reduce import gather_over, max_over
from recipes.planner.report import EXPOSED
from recipes.titan import device_module
from striped_cp import RingObserver
from striped_cp.observer import Span


class RingClock(RingObserver):
    """Seconds and bytes of this rank since it was made."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    def send(self, size: int) -> None:
        self.sent_bytes += size

    @abstractmethod
    def seconds(self) -> dict[Span, float]:
        """Time spent in each kind of span; waits until the device has done it all."""


class HostRingClock(RingClock):
    """For CPU tensors.

    Kernels are timed by the processor time of the thread that runs them, which other processes of
    the host do not disturb; a rank that waits uses none, so waiting is timed by the wall clock.
    """

    def __init__(self) -> None:
        super().__init__()
        self._clocks = {"attention": time.thread_time, "wait": time.perf_counter}
        self._seconds: dict[Span, float] = {"attention": 0.0, "wait": 0.0}
        self._began = 0.0

    def start(self, span: Span) -> None:
        self._began = self._clocks[span]()

    def stop(self, span: Span) -> None:
        self._seconds[span] += self._clocks[span]() - self._began

    def seconds(self) -> dict[Span, float]:
        return self._seconds


class DeviceRingClock(RingClock):
    """For accelerators: events in the stream, read when the step is over."""

    def __init__(self) -> None:
        super().__init__()
        self._events: dict[Span, list[tuple[torch.Event, torch.Event]]] = {
            "attention": [],
            "wait": [],
        }
        self._began = self._record()

    @staticmethod
    def _record() -> torch.Event:
        event = device_module.Event(enable_timing=True)
        event.record()
        return event

    def start(self, span: Span) -> None:
        self._began = self._record()

    def stop(self, span: Span) -> None:
        self._events[span].append((self._began, self._record()))

    def seconds(self) -> dict[Span, float]:
        device_module.synchronize()
        return {
            span: sum(start.elapsed_time(stop) for start, stop in events) / 1000
            for span, events in self._events.items()
        }


class RingTimes(NamedTuple):
    """One step of a ring of P ranks.

    Attributes:
        attention: seconds in attention kernels, forward and backward, mean over the ranks.
        slowest: the same of the slowest rank.
        wait: seconds in which a rank waited for a hop, mean over the ranks.
        least_wait: the same of the rank that waited least: communication that nothing hid.
        imbalance: slowest over mean attention; of several rings (data parallel) the largest.
        sent_bytes: bytes that a rank sent, mean over the ranks.
    """

    attention: float
    slowest: float
    wait: float
    least_wait: float
    imbalance: float
    sent_bytes: float


def ring_times(
    clock: RingClock, cp_mesh: DeviceMesh, batch_mesh: DeviceMesh | None, device: torch.device
) -> RingTimes:
    """What the ranks of a ring have measured. A collective.

    Args:
        batch_mesh: the ranks that hold different sequences, each with a ring of its own.
    """
    seconds = clock.seconds()
    mine = [seconds["attention"], seconds["wait"], clock.sent_bytes]
    by_rank = gather_over(torch.tensor(mine, dtype=torch.float64, device=device), cp_mesh)
    attention, wait, sent = by_rank.T
    imbalance = max_over(attention.max() / attention.mean(), batch_mesh)
    return RingTimes(
        attention.mean().item(),
        attention.max().item(),
        wait.mean().item(),
        wait.min().item(),
        imbalance.item(),
        sent.mean().item(),
    )


def wait_warning(ring: RingTimes | None, step_seconds: float) -> str | None:
    """What to say where even the rank that waits least waits for more than 5 % of a step."""
    if ring is None or ring.least_wait <= EXPOSED * step_seconds:
        return None
    return (
        f"every rank of the ring waits for {ring.least_wait / step_seconds:.0%} of a step or more: "
        "its hops outlast its tiles. Longer sequences per rank hide them, or ranks of a node that "
        "share heads (striped_cp.ulysses_degree; scripts/plan.py names the degree)"
    )
