"""Evaluation during training, every `evaluation.freq` steps."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.tensorboard import SummaryWriter

from recipes.evaluation import results as report
from recipes.evaluation.evaluator import Evaluator
from recipes.titan import logger


class PeriodicEvaluation:
    """Measures the model when it is due, and says what came out."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self.config = evaluator.config
        self.folder = Path(self.config.job.dump_folder, "evaluation")
        self.writer = SummaryWriter(str(self.folder)) if dist.get_rank() == 0 else None

    def due(self, step: int) -> bool:
        """Every `freq` steps, and at the end."""
        return step % self.config.evaluation.freq == 0 or step == self.config.training.steps

    def run(self, step: int, weights: Path | None = None) -> dict[str, Any]:
        """Measure, write and log; the result is on every rank.

        Args:
            step: of the training.
            weights: the folder they were loaded from, where that is no checkpoint of this run.
        """
        start = time.perf_counter()
        result = self.evaluator.run()
        if self.writer is not None:
            run = Path(self.config.job.dump_folder).resolve()
            measured = f"step {step} of {run}" if weights is None else str(weights.resolve())
            result = {"weights": measured, **result}
            names = ", ".join(map(str, report.write(result, self.folder, step, self.writer)))
            what = f"step {step}" if weights is None else str(weights)
            logger.info(f"evaluation of {what} in {time.perf_counter() - start:.1f} s: {names}")
        for line in report.table(result).splitlines():
            logger.info(line)
        return result
