"""`Plan`: a run, its memory and its time."""

from __future__ import annotations

from dataclasses import dataclass

from recipes.planner.footprint import GIB, MemoryPlan, plan_memory
from recipes.planner.hardware import Gpu
from recipes.planner.run import Run
from recipes.planner.step_time import TimePlan, plan_time

# The memory model is good to about 15 %: a plan that takes more than this share is a gamble.
COMFORTABLE = 0.9


@dataclass(frozen=True)
class Plan:
    """What the planner says about one run on one kind of GPU."""

    run: Run
    gpu: Gpu
    memory: MemoryPlan
    time: TimePlan

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.gpu.memory_gib * GIB

    @property
    def comfortable(self) -> bool:
        """Fits with room for what the model does not know."""
        return self.memory.total <= COMFORTABLE * self.gpu.memory_gib * GIB

    @property
    def seconds_per_billion_tokens(self) -> float:
        return 1e9 / self.run.tokens_per_step * self.time.step_seconds

    @property
    def gpu_hours_per_billion_tokens(self) -> float:
        return self.seconds_per_billion_tokens * self.run.gpus / 3600


def make_plan(run: Run, gpu: Gpu, network_gb_s: float) -> Plan:
    """Plan `run`; `network_gb_s` is usable GB/s per GPU between nodes (`find_network_gb_s`)."""
    return Plan(run, gpu, plan_memory(run), plan_time(run, gpu, network_gb_s))
