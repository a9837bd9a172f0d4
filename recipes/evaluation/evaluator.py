"""All measures of the `[evaluation]` section, shared out over the data-parallel ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Case:
    """A sample that is yet to be made: a long text takes megabytes.

    Attributes:
        depth: of the needle; None where it is drawn, or where there is none.
        seed: decides all that is drawn.
    """

    task: str
    length: int
    depth: float | None
    seed: tuple[int, ...]

    def make(self, encode: Encoder, hay: Haystack) -> Sample:
        """The same on every rank and in every call.

        Raises:
            ValueError: the length has no room for the task.
        """
        make, _ = TASKS[self.task]
        return make(encode, hay, np.random.default_rng(self.seed), self.length, self.depth or 0.0)


def list_cases(config: StripedJobConfig) -> list[Case]:
    """The samples of all tasks."""
    settings = config.evaluation
    return [
        Case(name, length, depth if has_depth else None, (settings.seed, number, length, i, repeat))
        for number, (name, (_, has_depth)) in enumerate(TASKS.items())
        if name in settings.tasks
        for length in lengths_of(config)
        # As many samples where the depth is drawn as there are in the row of a grid.
        for i, depth in enumerate(settings.depths)
        for repeat in range(settings.samples)
    ]


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
        self.encode = Encoder(tokenizer)
        source = build_source(config, "evaluation", tokenizer)
        count = lengths_of(config)[-1] * max(config.evaluation.texts, 1)
        self.hay = Haystack(self.encode, source, count)
        self.cases = list_cases(config)

    def run(self) -> dict[str, Any]:
        """Measure the model as it is; the same result on every rank."""
        training = self.model.training
        self.model.eval()
        try:
            answers = self._share(self.cases, self._answer, "tasks")
            texts = self._share(range(self.config.evaluation.texts), self._text, "texts")
        finally:
            self.model.train(training)
        result: dict[str, Any] = {
            "lengths": lengths_of(self.config),
            "depths": self.config.evaluation.depths,
            "tasks": summarize_tasks(self.cases, answers),
        }
        if texts:
            result["text"] = summarize(texts, self.config.evaluation.short_context)
        return result

    def _answer(self, case: Case) -> tuple[float, float]:
        """Share of the answer's tokens that are right, and their mean log-probability."""
        sample = case.make(self.encode, self.hay)
        scores = self.scorer(sample.tokens[None])
        correct, logprob = scores.correct[0, sample.answer], scores.logprob[0, sample.answer]
        return float(correct.mean()), float(logprob.mean(dtype=np.float64))

    def _text(self, number: int) -> TextScores:
        bos, longest = self.encode.bos, lengths_of(self.config)[-1]
        tokens = np.concatenate([bos, self.hay.take(number * longest, longest - len(bos))])
        return score_text(self.scorer, tokens, self.config.evaluation.short_context)

    def _share(
        self, items: Sequence[_Item], measure: Callable[[_Item], _Result], name: str
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
    cases: list[Case], answers: list[tuple[float, float]]
) -> dict[str, list[dict[str, Any]]]:
    """For every task the cells of its grid: means over the samples of one length and depth."""
    cells: dict[tuple[str, int, float | None], list[tuple[float, float]]] = {}
    for case, answer in zip(cases, answers, strict=True):
        cells.setdefault((case.task, case.length, case.depth), []).append(answer)
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
