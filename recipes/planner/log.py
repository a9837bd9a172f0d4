"""The plan in the log of a training run, next to what the run measures."""

from __future__ import annotations

from recipes.config.schema import StripedJobConfig
from recipes.planner.balance import with_counted_pairs
from recipes.planner.footprint import GIB
from recipes.planner.hardware import GPUS, find_network_gb_s, gpu_from_device_name
from recipes.planner.plan import Plan, make_plan
from recipes.planner.settings import run_from_config


def plan_of_run(config: StripedJobConfig, world_size: int, device_name: str) -> Plan:
    """The plan of a run that is about to start, one document per sequence.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it.

    Raises:
        ValueError: the planner has no figures for this device, or for these settings.
    """
    key = gpu_from_device_name(device_name)
    if key is None:
        raise ValueError(f"no figures for device {device_name}")
    gpu = GPUS[key]
    run = with_counted_pairs(run_from_config(config, world_size, gpu))
    return make_plan(run, gpu, find_network_gb_s(gpu.network))


def plan_line(plan: Plan) -> str:
    """One line with the figures that a run logs."""
    return (
        f"Plan for {plan.gpu.name}: {plan.memory.reserved / GIB:.1f} GiB reserved, "
        f"{plan.time.tokens_per_second_per_gpu:.0f} tokens/s/GPU, {plan.time.step_seconds:.2f} s a "
        f"step, MFU {plan.time.mfu_torchtitan:.1%} as torchtitan counts, "
        f"{plan.time.mfu_causal:.1%} causal"
    )


def plan_scalars(plan: Plan) -> dict[str, float]:
    """The same figures under the tags of the measured ones, after "planned/"."""
    return {
        "planned/throughput(tps)": plan.time.tokens_per_second_per_gpu,
        "planned/end_to_end(s)": plan.time.step_seconds,
        "planned/mfu(%)": 100 * plan.time.mfu_torchtitan,
        "planned/mfu_causal(%)": 100 * plan.time.mfu_causal,
        "planned/max_reserved(GiB)": plan.memory.reserved / GIB,
    }


def timeout_warning(plan: Plan, train_timeout_seconds: int) -> str | None:
    """What to say if a planned step takes longer than any operation may take after the first."""
    step = plan.time.step_seconds
    if step <= train_timeout_seconds:
        return None
    return (
        f"The plan expects {step:.0f} s a step, comm.train_timeout_seconds is "
        f"{train_timeout_seconds}: a rank that waits for another one's step ends the run; set it "
        f"to {2 * step:.0f} or more"
    )
