"""Draws one layer's ring, forward and backward, from the profiler traces of a run on CPU ranks.

python docs/images/ring_trace.py outputs/debug_cpu/profile_traces/iteration_3 ring_trace.png
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

OPS = {"forward": "striped_cp::ring_attention", "backward": "striped_cp::ring_attention_backward"}
KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"
HOPS = ("gloo:send", "gloo:recv")
COLORS = {"kernel": "#e8710a", "hop": "#1a73e8", "merge": "#b8b8b8"}


def read(file: Path) -> list[dict]:
    """Complete events of a trace, their times in ms of one clock for all ranks of a host."""
    trace = json.loads(file.read_text())
    base = trace["baseTimeNanoseconds"] / 1e6
    return [
        {**event, "start": base + event["ts"] / 1e3, "ms": event["dur"] / 1e3}
        for event in trace["traceEvents"]
        if event.get("ph") == "X"
    ]


def ring_calls(events: list[dict], op: str) -> list[dict]:
    return sorted((e for e in events if e["name"] == op), key=lambda e: e["start"])


def draw(axes, traces: list[list[dict]], op: str, layer: int) -> None:
    """Two lanes a rank: what it computes, and its hops from post to receipt."""
    calls = [ring_calls(events, op)[layer] for events in traces]
    zero = min(call["start"] for call in calls)
    for rank, (events, call) in enumerate(zip(traces, calls, strict=True)):
        inside = [e for e in events if 0 <= e["start"] - call["start"] <= call["ms"]]
        lane = 3 * rank
        axes.broken_barh(
            [(call["start"] - zero, call["ms"])], (lane + 0.1, 0.8), color=COLORS["merge"]
        )
        tiles = [e for e in inside if e["name"].startswith(KERNEL)]
        for number, tile in enumerate(sorted(tiles, key=lambda e: e["start"])):
            start = tile["start"] - zero
            axes.broken_barh([(start, tile["ms"])], (lane + 0.1, 0.8), color=COLORS["kernel"])
            axes.text(
                start + tile["ms"] / 2, lane + 0.5, f"tile {number}", ha="center", va="center"
            )
        hops = [(e["start"] - zero, e["ms"]) for e in inside if e["name"] in HOPS]
        for number, hop in enumerate(hops):
            height = 0.8 / len(hops)
            axes.broken_barh(
                [hop], (lane + 1.1 + number * height, 0.8 * height), color=COLORS["hop"]
            )
    axes.set_yticks([0.5, 1.5, 3.5, 4.5])
    axes.set_yticklabels(["rank 0 computes", "rank 0 hops", "rank 1 computes", "rank 1 hops"])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)


def main(folder: str, picture: str) -> None:
    traces = [read(file) for file in sorted(Path(folder).glob("rank*_trace.json"))]
    figure, both = pyplot.subplots(2, 1, figsize=(9, 5), constrained_layout=True)
    for axes, (direction, op) in zip(both, OPS.items(), strict=True):
        draw(axes, traces, op, layer=1)
        axes.set_title(f"one layer, {direction}", loc="left")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    labels = ["attention kernel", "hops, from post to pick-up", "waiting and merging"]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
