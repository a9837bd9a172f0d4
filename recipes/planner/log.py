"""The plan in the log of a training run, next to what the run measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipes.planner.hardware import GPUS, find_network_gb_s, gpu_from_device_name
from recipes.planner.memory import GIB
from recipes.planner.plan import make_plan
from recipes.planner.settings import run_from_config

if TYPE_CHECKING:
    from recipes.config import StripedJobConfig


def plan_line(config: StripedJobConfig, world_size: int, device_name: str) -> str:
    """One line with the figures that torchtitan logs, as planned for one document per sequence.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.
    """
    key = gpu_from_device_name(device_name)
    if key is None:
        return f"Plan: no figures for device {device_name}"
    gpu = GPUS[key]
    try:
        run = run_from_config(config, world_size, gpu)
    except ValueError as error:
        return f"Plan: none, {error}"
    plan = make_plan(run, gpu, find_network_gb_s(gpu.network))
    return (
        f"Plan for {gpu.name}: {plan.memory.reserved / GIB:.1f} GiB reserved, "
        f"{plan.time.tokens_per_second_per_gpu:.0f} tokens/s/GPU, {plan.time.step_seconds:.2f} s a "
        f"step, MFU {plan.time.mfu_torchtitan:.1%} as torchtitan counts, "
        f"{plan.time.mfu_causal:.1%} causal"
    )
