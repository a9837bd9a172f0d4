"""The end of a run: one line for its user, one JSON file for scripts."""

import json
import operator
import time
from dataclasses import astuple, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

FILE = "summary.json"


@dataclass(frozen=True)
class Work:
    """What all ranks together did between two logs, validation left out.

    Attributes:
        flops, flops_causal: see `ModelShape.training_flops_per_token`.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    flops: float = 0.0
    flops_causal: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(operator.add, astuple(self), astuple(other)))


class Summary:
    """Figures of a run, gathered as they are logged.

    Rates leave out what was logged first, if there is more: the first step allocates memory,
    compiles kernels and opens files.

    Args:
        peak_flops: of one rank per second.
        planned: what the planner said, by tag.
    """

    def __init__(self, world_size: int, peak_flops: float, planned: dict[str, float]) -> None:
        self.world_size = world_size
        self.peak_flops = peak_flops
        self.planned = planned
        self.first: Work | None = None
        self.rest = Work()
        self.peak_memory_gib = 0.0
        self.imbalances: list[float] = []
        self.kernel: dict[str, Any] | None = None
        self.tokens_seen = 0
        self.loss: float | None = None
        self.validation_loss: float | None = None

    def add(self, work: Work, tokens_seen: int, loss: float, memory_gib: float) -> None:
        """Take over what has just been logged."""
        if self.first is None:
            self.first = work
        else:
            self.rest += work
        self.tokens_seen, self.loss = tokens_seen, loss
        self.peak_memory_gib = max(self.peak_memory_gib, memory_gib)

    def table(self, logs: str | None) -> dict[str, Any]:
        """The figures by name, units in the names; at least one log has been added.

        Args:
            logs: folder of the TensorBoard files.
        """
        assert self.first is not None
        total = self.first + self.rest
        steady = self.rest if self.rest.steps else self.first
        per_rank = steady.seconds * self.world_size
        imbalances = self.imbalances[1:] or self.imbalances
        return {
            "steps": total.steps,
            "tokens": total.tokens,
            "tokens_seen": self.tokens_seen,
            "seconds": total.seconds,
            "ranks": self.world_size,
            "tokens_per_second": steady.tokens / steady.seconds,
            "tokens_per_second_per_rank": steady.tokens / per_rank,
            "mfu_percent": 100 * steady.flops / (per_rank * self.peak_flops),
            "mfu_causal_percent": 100 * steady.flops_causal / (per_rank * self.peak_flops),
            "peak_memory_gib": self.peak_memory_gib,
            "ring_imbalance": fmean(imbalances) if imbalances else None,
            "loss": self.loss,
            "validation_loss": self.validation_loss,
            "kernel": self.kernel,
            "planned": self.planned,
            "logs": logs,
        }

    def write(self, folder: Path, logs: str | None) -> str:
        """Write summary.json into `folder`; returns the line to print."""
        table = self.table(logs)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        if path.exists():  # of the run before
            changed = time.localtime(path.stat().st_mtime)
            path.rename(folder / f"summary-{time.strftime('%Y%m%d-%H%M%S', changed)}.json")
        path.write_text(json.dumps(table, indent=2) + "\n")
        ring = table["ring_imbalance"]
        parts = [
            f"{table['steps']} steps, {table['tokens']:,} tokens in "
            f"{timedelta(seconds=round(table['seconds']))}",
            f"{table['tokens_per_second_per_rank']:,.0f} tokens/s per rank, "
            f"{table['tokens_per_second']:,.0f} in all",
            f"MFU {table['mfu_percent']:.2f}% (causal {table['mfu_causal_percent']:.2f}%)",
            f"peak memory {table['peak_memory_gib']:.2f} GiB",
            f"ring imbalance {ring:.2f}" if ring is not None else "no ring measured",
            f"TensorBoard files in {logs}" if logs else "no TensorBoard files",
            f"figures in {path}",
        ]
        return "Summary: " + "; ".join(parts)
