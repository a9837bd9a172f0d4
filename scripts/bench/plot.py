"""Speedup and efficiency against ring size and sequence length, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .report import Row

AXES = {"world_size": "ranks in the ring (P)", "seq_len": "sequence length (tokens)"}
VALUES = {
    "speedup_vs_contiguous": "speedup over the contiguous ring",
    "efficiency": "efficiency (ideal time / time)",
}


def require_matplotlib() -> None:
    """Raise ValueError, with the remedy, if the plot cannot be drawn later."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from None


def plot(path: Path, rows: Sequence[Row]) -> None:
    """One panel per value and axis; a line per layout and setting of the other axis."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        len(VALUES), len(AXES), figsize=(11, 8), squeeze=False, constrained_layout=True
    )
    for line, (value, value_label) in zip(panels, VALUES.items(), strict=True):
        for panel, (axis, axis_label) in zip(line, AXES.items(), strict=True):
            (other,) = AXES.keys() - {axis}
            for layout in dict.fromkeys(row["layout"] for row in rows):
                for setting in sorted({row[other] for row in rows}):
                    points = sorted(
                        (row[axis], row[value])
                        for row in rows
                        if (row["layout"], row[other]) == (layout, setting)
                        and row[value] is not None
                    )
                    label = f"{layout}, {'S' if other == 'seq_len' else 'P'} = {setting}"
                    panel.plot(*zip(*points, strict=True), "o-", label=label) if points else None
            panel.set(xlabel=axis_label, ylabel=value_label, xscale="log")
            ticks = sorted({row[axis] for row in rows})
            panel.set_xticks(ticks, [str(tick) for tick in ticks])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
            panel.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
