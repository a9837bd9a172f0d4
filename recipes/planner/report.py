"""Plans as text, as JSON-ready tables, and as TOML."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from recipes.planner.footprint import GIB
from recipes.planner.plan import Plan, make_plan
from recipes.planner.run import Run
from recipes.planner.search import degrees_of_ulysses
from recipes.planner.step_time import Hop

EXPOSED = 0.05


def plan_text(plan: Plan) -> str:
    """The whole report for one run."""
    run, gpu, memory, time = plan.run, plan.gpu, plan.memory, plan.time
    degrees = [f"{name} {degree}" for name, degree in run.mesh.items() if degree > 1]
    lines = [
        f"{run.gpus} x {gpu.name}: {' x '.join(degrees) or 'dp 1'}",
        f"{run.sequences_per_step} x {run.seq_len} tokens per step, {run.local_tokens} per rank and"
        f" sequence; {run.layout} ring of {ring_text(run)}, "
        f"kernel {run.kernel}, {run.levers_in_use}",
        "",
        f"memory per GPU, peak in {memory.moment}",
    ]
    for name, size in memory.parts.items():
        note = "" if name in memory.at_peak else "  (not at the peak)"
        lines.append(f"  {name:<18}{size / GIB:8.2f} GiB{note}")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    lines.append(f"  {'total':<18}{memory.total / GIB:8.2f} GiB of {gpu.memory_gib:g}: {verdict}")
    if plan.fits and not plan.comfortable:
        lines.append("  less than 10 % is left, and the model is good to about 15 %")
    if memory.host:
        lines.append(f"  host memory       {memory.host / GIB:8.2f} GiB per GPU, pinned")
    lines += ["", "time per step"]
    for name, seconds in time.parts.items():
        if seconds:
            share = seconds / time.step_seconds
            lines.append(f"  {name:<18}{seconds:10.4g} s {share:6.1%}")
    lines += [
        f"  {'total':<18}{time.step_seconds:10.4g} s; bound by {time.bound_by}",
        "",
        f"{time.tokens_per_second_per_gpu:.1f} tokens/s/GPU, "
        f"{plan.seconds_per_billion_tokens / 3600:.3g} h and "
        f"{plan.gpu_hours_per_billion_tokens:.4g} GPU hours per billion tokens",
        f"MFU {time.mfu_causal:.1%} (causal: only visible pairs count), "
        f"{time.mfu_torchtitan:.1%} (torchtitan: the full square counts)",
    ]
    lines += [hop_text(name, hop) for name, hop in time.hops.items()]
    return "\n".join(lines)


def ring_text(run: Run) -> str:
    """The ranks of the ring, and those that share heads."""
    return str(run.ring) if run.ulysses == 1 else f"{run.ring} x {run.ulysses} that share heads"


def exposed_ring_text(plan: Plan, network_gb_s: float) -> str | None:
    """Where hops that nothing hides take more than 5 % of a step: the degree that mends it."""
    share = plan.time.parts["exposed ring"] / plan.time.step_seconds
    if share <= EXPOSED:
        return None
    better = max(
        (make_plan(run, plan.gpu, network_gb_s) for run in degrees_of_ulysses(plan.run, plan.gpu)),
        key=lambda other: other.time.tokens_per_second_per_gpu,
    )
    told = f"hops of the ring that nothing hides take {share:.1%} of a step"
    speed, degree = better.time.tokens_per_second_per_gpu, better.run.ulysses
    if speed <= plan.time.tokens_per_second_per_gpu:
        return told
    return f"{told}; with striped_cp.ulysses_degree = {degree}: {speed:.1f} tokens/s/GPU"


def later_kernel_text(plan: Plan, network_gb_s: float) -> str | None:
    """What a later FlashAttention, a package of its own, would give on this GPU."""
    later = next((name for name in ("fa4", "fa3") if name in plan.gpu.kernels), None)
    if later is None or plan.run.kernel == later:
        return None
    rate = make_plan(replace(plan.run, kernel=later), plan.gpu, network_gb_s).time
    return (
        f'with {later} installed, which striped_cp.kernel = "auto" then times too: '
        f"{rate.tokens_per_second_per_gpu:.1f} tokens/s/GPU"
    )


def hop_text(name: str, hop: Hop) -> str:
    verdict = "hides behind" if hop.hidden else "EXCEEDS"
    length = hop.hides_from_local_tokens
    hides = "; never hides" if length is None else f"; hides from {length:.0f} local tokens"
    if length is None and hop.hidden:  # a window, and with it no such length
        hides = ""
    return (
        f"ring hop {name}: {hop.bytes} bytes in {1e3 * hop.seconds:.4g} ms, {verdict} its tile of "
        f"{1e3 * hop.tile_seconds:.4g} ms{hides}"
    )


def plan_table(plan: Plan) -> dict[str, Any]:
    """Everything in `plan_text`, with units in the keys."""
    run, memory, time = plan.run, plan.memory, plan.time
    return {
        "gpu": plan.gpu.name,
        "gpus": run.gpus,
        "mesh": run.mesh,
        "ulysses_degree": run.ulysses,
        "levers": run.levers_in_use,
        "kernel": run.kernel,
        "layout": run.layout,
        "tokens_per_step": run.tokens_per_step,
        "local_tokens": run.local_tokens,
        "memory": {
            "parts_bytes": {name: round(size) for name, size in memory.parts.items()},
            "at_peak": [name for name in memory.parts if name in memory.at_peak],
            "moment": memory.moment,
            "total_bytes": round(memory.total),
            "reserved_bytes": round(memory.reserved),
            "host_bytes": round(memory.host),
            "capacity_bytes": round(plan.gpu.memory_gib * GIB),
        },
        "fits": plan.fits,
        "time": {
            "parts_s": time.parts,
            "step_s": time.step_seconds,
            "bound_by": time.bound_by,
            "billion_tokens_s": plan.seconds_per_billion_tokens,
            "billion_tokens_gpu_hours": plan.gpu_hours_per_billion_tokens,
        },
        "tokens_per_second_per_gpu": time.tokens_per_second_per_gpu,
        "mfu_causal": time.mfu_causal,
        "mfu_torchtitan": time.mfu_torchtitan,
        "ring_hops": {
            name: {
                "bytes": hop.bytes,
                "hop_s": hop.seconds,
                "tile_s": hop.tile_seconds,
                "hidden": hop.hidden,
                "hides_from_local_tokens": hop.hides_from_local_tokens,
            }
            for name, hop in time.hops.items()
        },
    }


def search_text(plans: list[Plan]) -> str:
    """Ranked table of a search."""
    lines = [
        "  dp  cp  ul  tp  pp  batch x acc  tok/s/GPU  step s  MFU causal  GiB    kernel  levers",
    ]
    for plan in plans:
        run, time = plan.run, plan.time
        lines.append(
            f"{run.dp_shard:4d}{run.cp:4d}{run.ulysses:4d}{run.tp:4d}{run.pp:4d}"
            f"{run.local_batch:7d} x {run.gradient_accumulation:<3d}"
            f"{time.tokens_per_second_per_gpu:11.1f}{time.step_seconds:8.1f}{time.mfu_causal:12.1%}"
            f"{plan.memory.total / GIB:7.1f}  {run.kernel:<8}{run.levers_in_use}"
        )
    return "\n".join(lines)


def toml_text(table: dict[str, Any], heading: str) -> str:
    """A table of tables as TOML; `heading` becomes its first comment line.

    Values are what a TOML file of this project holds: strings, numbers, booleans, lists of them and
    arrays of tables.
    """
    return f"# {heading}\n" + "".join(_section(table, ""))


def _section(table: dict[str, Any], name: str, array: bool = False) -> list[str]:
    nested = {
        key: value if isinstance(value, list) else [value]
        for key, value in table.items()
        if isinstance(value, dict) or _is_array(value)
    }
    values = [
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in table.items()
        if key not in nested
    ]
    head = f"\n[[{name}]]\n" if array else f"\n[{name}]\n"
    lines = [head, *values] if name and (values or array) else values
    for key, tables in nested.items():
        for one in tables:
            lines += _section(one, f"{name}.{key}" if name else key, isinstance(table[key], list))
    return lines


def _is_array(value: object) -> bool:
    """Whether it is an array of tables."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) for v in value)
