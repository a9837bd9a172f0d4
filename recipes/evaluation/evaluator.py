"""All measures of the `[evaluation]` section, shared out over the data-parallel ranks."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from recipes.config.schema import StripedJobConfig
from recipes.data.dataset import build_source, tell_of_novels
from recipes.evaluation.haystack import Encoder, Haystack
from recipes.evaluation.scorer import Scorer
from recipes.evaluation.tasks import TASKS, Sample
from recipes.evaluation.text import TextScores, score_text, summarize
from recipes.titan import ParallelDims

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def lengths_of(config: StripedJobConfig) -> list[int]:
    """Lengths in tokens: those of the section, or a quarter, half and all of training's."""
    seq_len = config.training.seq_len
    return sorted(set(config.evaluation.lengths)) or [seq_len // 4, seq_len // 2, seq_len]


def make_samples(config: StripedJobConfig, encode: Encoder, hay: Haystack) -> list[Sample]:
    """The samples of all tasks, the same on every rank and in every call.

    Raises:
        ValueError: a length has no room for a task.
    """
    settings = config.evaluation
    samples = []
    for number, name in enumerate(TASKS):
        if name not in settings.tasks:
            continue
        make, has_depth = TASKS[name]
        # As many samples where the depth is drawn as there are in the row of a grid.
        depths = settings.depths if has_depth else [0.0] * len(settings.depths)
        for length in lengths_of(config):
            for i, depth in enumerate(depths):
                for repeat in range(settings.samples):
                    dice = np.random.default_rng([settings.seed, number, length, i, repeat])
                    samples.append(make(encode, hay, dice, length, depth))
    return samples


class Evaluator:
    """
    Args:
        tokenizer: of the model.
        model: whole (no pipeline), spread as `parallel_dims` says.
    """

    def __init__(
        self,
        config: StripedJobConfig,
        tokenizer: Any,
        parallel_dims: ParallelDims,
        model: nn.Module,
    ) -> None:
        self.config = config
        self.model = model
        self.scorer = Scorer(config, parallel_dims, model)
        batch_mesh = parallel_dims.get_optional_mesh("batch")
        self.dp_degree = batch_mesh.size() if batch_mesh is not None else 1
        self.dp_rank = batch_mesh.get_local_rank() if batch_mesh is not None else 0
        tell_of_novels(config, "evaluation")
        encode = Encoder(tokenizer)
        source = build_source(config, "evaluation", tokenizer)
        longest = lengths_of(config)[-1]
        self.hay = Haystack(encode, source, count=longest * max(config.evaluation.texts, 1))
        self.samples = make_samples(config, encode, self.hay)
        self.texts = [
            np.concatenate([encode.bos, self.hay.take(i * longest, longest - len(encode.bos))])
            for i in range(config.evaluation.texts)
        ]

    def run(self) -> dict[str, Any]:
        """Measure the model as it is; the same result on every rank."""
        training = self.model.training
        self.model.eval()
        try:
            answers = self._share(self.samples, self._answer, "tasks")
            texts = self._share(self.texts, self._text, "texts")
        finally:
            self.model.train(training)
        result: dict[str, Any] = {
            "lengths": lengths_of(self.config),
            "depths": self.config.evaluation.depths,
            "tasks": summarize_tasks(self.samples, answers),
        }
        if texts:
            result["text"] = summarize(texts, self.config.evaluation.short_context)
        return result

    def _answer(self, sample: Sample) -> tuple[float, float]:
        """Share of the answer's tokens that are right, and their mean log-probability."""
        scores = self.scorer(sample.tokens[None])
        correct, logprob = scores.correct[0, sample.answer], scores.logprob[0, sample.answer]
        return float(correct.mean()), float(logprob.mean(dtype=np.float64))

    def _text(self, tokens: np.ndarray) -> TextScores:
        return score_text(self.scorer, tokens, self.config.evaluation.short_context)

    def _share(
        self, items: list[_Item], measure: Callable[[_Item], _Result], name: str
    ) -> list[_Result]:
        """Results of all items, in order; every data-parallel rank measures its part of them.

        All ranks call the model equally often, since sharded weights are gathered together: the
        last items are measured twice where the ranks do not divide them.
        """
        rounds = -(-len(items) // self.dp_degree)
        own: dict[int, _Result] = {}
        # Only where someone looks: no bar in a log file, or from the other ranks.
        quiet = True if dist.get_rank() else None
        for i in tqdm(range(rounds), desc=f"evaluation, {name}", disable=quiet):
            index = min(i * self.dp_degree + self.dp_rank, len(items) - 1)
            own[index] = measure(items[index])
        parts: list[dict[int, _Result] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        merged = {i: result for part in parts if part for i, result in part.items()}
        return [merged[i] for i in range(len(items))]


def summarize_tasks(
    samples: list[Sample], answers: list[tuple[float, float]]
) -> dict[str, list[dict[str, Any]]]:
    """For every task the cells of its grid: means over the samples of one length and depth."""
    cells: dict[tuple[str, int, float | None], list[tuple[float, float]]] = {}
    for sample, answer in zip(samples, answers, strict=True):
        cells.setdefault((sample.task, sample.length, sample.depth), []).append(answer)
    tasks: dict[str, list[dict[str, Any]]] = {}
    for (task, length, depth), values in cells.items():
        shares, logprobs = np.array(values).T
        tasks.setdefault(task, []).append(
            {
                "length": length,
                "depth": depth,
                "samples": len(values),
                "exact": float((shares == 1).mean()),
                "accuracy": float(shares.mean()),
                "logprob": float(logprobs.mean()),
            }
        )
    return tasks
