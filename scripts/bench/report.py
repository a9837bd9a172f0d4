"""Rows of results: as JSON, as a table, as a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from striped_cp.layout import layout_from_spec

from .case import Case
from .measure import Samples, median, spread
from .pairs import computed_over_visible

Row = dict[str, Any]

_OF_CASE = ("device", "dtype", "batch", "heads", "kv_heads", "head_dim", "kernel", "rotate_method")


def rows_of(case: Case, mode: str, samples: Samples) -> list[Row]:
    """One row per layout. Times in seconds, medians over the repeats; spreads relative to them.

    kernel_limit: the largest speedup of stripes over the contiguous ring that the kernel allows for
    one document, (c + P - 1) / (P c), c the time of a causal tile over that of a full one.
    pairs_over_visible: pairs of tokens that the kernel computes, over those that see each other.
    """
    ideal = median(samples.ideal).total
    alone = median(samples.alone).total if samples.alone else None
    causal, full = median(samples.causal).total, median(samples.full).total
    c = causal / full
    size = case.world_size
    other = case.documents or case.window or case.ulysses > 1
    limit = None if other else (c + size - 1) / (size * c)
    contiguous = samples.rings.get("contiguous")
    rows = []
    for name, timings in samples.rings.items():
        forward, backward = median(timings)
        total = statistics.median(t.total for t in timings)
        rows.append(
            {
                "layout": name,
                "mode": mode,
                "world_size": size,
                "ulysses": case.ulysses,
                "seq_len": case.seq_len,
                "documents": None if case.documents is None else list(case.documents),
                "window": case.window,
                "pairs_over_visible": computed_over_visible(case, layout_from_spec(name)),
                "forward_s": forward,
                "backward_s": backward,
                "total_s": total,
                "ideal_s": ideal,
                "ideal_alone_s": alone,
                "efficiency": ideal / total,
                "speedup_vs_contiguous": contiguous
                and statistics.median(t.total for t in contiguous) / total,
                "kernel_limit": limit,
                "causal_tile_s": causal,
                "full_tile_s": full,
                "total_spread": spread(timings),
                "ideal_spread": spread(samples.ideal),
                "repeats": len(timings),
                "peak_bytes": samples.peak[name],
                **{name: getattr(case, name) for name in _OF_CASE},
            }
        )
    return rows


def write_json(path: Path, rows: Sequence[Row]) -> None:
    """A JSON list, one row a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


def table(rows: Sequence[Row]) -> str:
    """Rows for people: times in ms, ratios, peak memory of a rank in MiB."""
    header = "layout P U S docs window forward backward total +- ideal"
    cells = [[*header.split(), "alone", "efficiency", "speedup", "limit", "pairs", "MiB"]]
    for row in rows:
        cells.append(
            [
                row["layout"],
                str(row["world_size"]),
                str(row["ulysses"]),
                str(row["seq_len"]),
                str(len(row["documents"] or [1])),
                str(row["window"] or "-"),
                *(f"{1000 * row[key]:.1f}" for key in ("forward_s", "backward_s", "total_s")),
                f"{row['total_spread'] / 2:.1%}",
                f"{1000 * row['ideal_s']:.1f}",
                "-" if row["ideal_alone_s"] is None else f"{1000 * row['ideal_alone_s']:.1f}",
                f"{row['efficiency']:.3f}",
                _ratio(row["speedup_vs_contiguous"]),
                _ratio(row["kernel_limit"]),
                _ratio(row["pairs_over_visible"]),
                f"{row['peak_bytes'] / 2**20:.1f}",
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
