"""Results as JSON, a table, TensorBoard scalars and images, and a PNG."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write(result: dict[str, Any], folder: Path, step: int, writer: SummaryWriter) -> list[Path]:
    """Write step-N.json and, where there is a heat-map, step-N.png; log both to TensorBoard.

    No other result is overwritten. Where there is one of this step, of other weights or settings,
    the files are step-N-2.json and so on, and TensorBoard's a run of their own, step-N-2.

    Returns:
        The files written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = _write_new(folder, f"step-{step}", {"step": step, **result})
    written = [file]
    figure = draw(result)
    if figure is not None:
        written.append(file.with_suffix(".png"))
        figure.savefig(written[1], dpi=120)
    another = file.stem != f"step-{step}"
    with SummaryWriter(str(folder / file.stem)) if another else nullcontext(writer) as log:
        for name, value in scalars(result):
            log.add_scalar(name, value, step)
        if figure is not None:
            log.add_figure("evaluation/accuracy", figure, step)
        log.flush()
    return written


def _write_new(folder: Path, name: str, value: dict[str, Any]) -> Path:
    """Write NAME.json, or the first of NAME-2.json, NAME-3.json, ... that says nothing else."""
    text = json.dumps(value, indent=2) + "\n"
    for number in count(1):
        path = folder / f"{name}{f'-{number}' if number > 1 else ''}.json"
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
            return path
        except FileExistsError:
            if path.read_bytes() == text.encode():
                return path
    raise AssertionError


def scalars(result: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Accuracy and log-probability by task and length, and the measures of text."""
    for task, cells in result["tasks"].items():
        for length in result["lengths"]:
            for measure in ("accuracy", "exact", "logprob"):
                values = [cell[measure] for cell in cells if cell["length"] == length]
                yield f"evaluation/{task}/{measure}/{length}", float(np.mean(values))
    text = result.get("text", {})
    for measure in ("loss", "gain", "longppl"):
        if text.get(measure) is not None:
            yield f"evaluation/text/{measure}", text[measure]
    for bucket in text.get("positions", ()):
        yield f"evaluation/text/loss_from/{bucket['first']}", bucket["loss"]


def table(result: dict[str, Any]) -> str:
    """A few lines for the console."""
    lines = []
    for task, cells in result["tasks"].items():
        rows = {
            length: np.mean([c["accuracy"] for c in cells if c["length"] == length])
            for length in result["lengths"]
        }
        accuracies = "  ".join(f"{length}: {value:6.1%}" for length, value in rows.items())
        lines.append(f"{task:10}  accuracy by length  {accuracies}")
    if "text" in result:
        lines += _text_lines(result["text"])
    return "\n".join(lines)


def _text_lines(text: dict[str, Any]) -> list[str]:
    positions = "  ".join(f"{b['first']}-{b['last']}: {b['loss']:.3f}" for b in text["positions"])
    lines = [f"text        loss by position    {positions}"]
    if text["gain"] is None:
        lines.append(
            f"text        no gain of far context: the texts have {text['length']} tokens, "
            f"evaluation.short_context is {text['short_context']}"
        )
        return lines
    longppl = "none" if text["longppl"] is None else f"{text['longppl']:.3f}"
    lines.append(
        f"text        gain over {text['short_context']} tokens of context {text['gain']:+.4f} "
        f"nats  LongPPL {longppl} ({text['key_tokens']} key tokens)"
    )
    return lines


def draw(result: dict[str, Any]) -> "Figure | None":
    """A heat-map of accuracy, depth by length, for every task with depths; None without one."""
    grids = {
        task: cells for task, cells in result["tasks"].items() if cells[0]["depth"] is not None
    }
    if not grids:
        return None
    # Imported late: it is needed only to draw.
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.use("Agg")  # no display
    lengths, depths = result["lengths"], result["depths"]
    size = (1.5 + len(grids) * (1.6 + 0.7 * len(lengths)), 1.8 + 0.45 * len(depths))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(grids), squeeze=False)[0]
    for panel, (task, cells) in zip(panels, grids.items(), strict=True):
        accuracy = {(c["depth"], c["length"]): c["accuracy"] for c in cells}
        values = np.array([[accuracy[d, n] for n in lengths] for d in depths])
        image = panel.imshow(values, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            color = "white" if abs(value - 0.5) > 0.4 else "black"
            panel.text(column, row, f"{value:.2f}", ha="center", va="center", color=color)
        panel.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=30)
        panel.set_yticks(range(len(depths)), [f"{d:.0%}" for d in depths])
        panel.set(title=task, xlabel="length (tokens)", ylabel="depth of the needle")
    figure.colorbar(image, ax=panels, label="accuracy of the answer's tokens")
    return figure
