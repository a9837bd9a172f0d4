"""Whole training steps through train.py, one run per layout and repeat."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from .report import Row
from .training import train


def measure(
    world_size: int,
    seq_len: int,
    layouts: Sequence[str],
    repeats: int,
    config: Path,
    settings: Sequence[str],
) -> list[Row]:
    """One row per layout, tokens/s of all ranks; layouts take turns in every repeat.

    Args:
        config: the job's TOML.
        settings: further settings of the job, the same for every layout.
    """
    speeds: dict[str, list[float]] = {layout: [] for layout in layouts}
    for _ in range(repeats):
        for layout in layouts:
            speeds[layout].append(tokens_per_second(world_size, seq_len, layout, config, settings))
    contiguous = statistics.median(speeds["contiguous"]) if "contiguous" in speeds else None
    rows = []
    for layout, values in speeds.items():
        speed = statistics.median(values)
        rows.append(
            {
                "layout": layout,
                "mode": "end_to_end",
                "world_size": world_size,
                "seq_len": seq_len,
                "tokens_per_second": speed,
                "tokens_per_second_spread": (max(values) - min(values)) / speed,
                "speedup_vs_contiguous": contiguous and speed / contiguous,
                "tokens_per_second_runs": values,
                "repeats": repeats,
                "config": str(config),
                "settings": list(settings),
            }
        )
    return rows


def tokens_per_second(
    world_size: int, seq_len: int, layout: str, config: Path, settings: Sequence[str]
) -> float:
    """Speed of one run of four sequences, after its first step."""
    name, _, block_size = layout.partition(":")
    summary = train(
        config,
        world_size,
        *("--training.seq_len", str(seq_len), "--training.local_batch_size", "1"),
        *("--training.steps", "4"),
        *("--parallelism.context_parallel_load_balancer", name),
        *("--striped_cp.block_size", block_size or "1"),
        *settings,
    )
    return summary["tokens_per_second"]


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'layout':12} {'P':>3} {'S':>8} {'tokens/s':>9} {'+-':>6} {'speedup':>8}"]
    for row in rows:
        speedup = row["speedup_vs_contiguous"]
        lines.append(
            f"{row['layout']:12} {row['world_size']:3} {row['seq_len']:8} "
            f"{row['tokens_per_second']:9.0f} {row['tokens_per_second_spread'] / 2:6.1%} "
            f"{'-' if speedup is None else format(speedup, '.3f'):>8}"
        )
    return "\n".join(lines)
