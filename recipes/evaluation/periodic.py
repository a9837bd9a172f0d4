"""Evaluation during training, every `evaluation.freq` steps."""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from recipes.config.schema import StripedJobConfig
from recipes.data.shards import read_json
from recipes.evaluation import results as report
from recipes.evaluation.evaluator import Evaluator
from recipes.titan import ParallelDims, logger


class PeriodicEvaluation:
    """Measures the model when it is due, and says what came out."""

    def __init__(
        self,
        config: StripedJobConfig,
        tokenizer: Any,
        parallel_dims: ParallelDims,
        model: nn.Module,
    ) -> None:
        self.config = config
        self.evaluator = Evaluator(config, tokenizer, parallel_dims, model)
        self.folder = Path(config.job.dump_folder, "evaluation")
        self.writer = SummaryWriter(str(self.folder)) if dist.get_rank() == 0 else None

    def due(self, step: int) -> bool:
        """Every `freq` steps, and at the end."""
        return step % self.config.evaluation.freq == 0 or step == self.config.training.steps

    def run(self, step: int, weights: Path | None = None) -> dict[str, Any]:
        """Measure, write and log; the result is on every rank.

        Args:
            step: of the training.
            weights: the folder they were loaded from, where that is no step of this run.
        """
        start = time.perf_counter()
        result = self.evaluator.run()
        if self.writer is not None:
            name = f"step-{step}" if weights is None else self._name(weights)
            result = {"weights": str(weights or f"this run, step {step}"), **result}
            files = report.write(result, self.folder, name, step, self.writer)
            names = ", ".join(str(file) for file in files)
            logger.info(
                f"evaluation of step {step} in {time.perf_counter() - start:.1f} s: {names}"
            )
        for line in report.table(result).splitlines():
            logger.info(line)
        return result

    def _name(self, weights: Path) -> str:
        """Of the files about weights from elsewhere: no other weights' files are overwritten."""
        name, number = f"initial-{weights.resolve().name}", 1
        while True:
            path = self.folder / f"{name}.json"
            if not path.exists() or read_json(path).get("weights") == str(weights):
                return name
            number += 1
            name = f"initial-{weights.resolve().name}-{number}"
