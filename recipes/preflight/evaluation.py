"""Startup checks of the `[evaluation]` section."""

from pathlib import Path

from recipes.checkpoint.files import checkpoint_to_load
from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting, choices
from recipes.data.dataset import build_source
from recipes.data.tokens import Tokenizer
from recipes.evaluation.evaluator import lengths_of, make_samples
from recipes.evaluation.haystack import Encoder, Haystack
from recipes.evaluation.tasks import TASKS
from recipes.models.llama3.args import FLAVORS
from recipes.models.llama3.rope import longest_sequence
from recipes.preflight.weights import loads_hf

# All are made before the first is measured.
_MOST_TEXTS = 100_000


def check_evaluation(config: StripedJobConfig) -> None:
    """Check what an evaluation needs; reads a little of its text. The dataset has been checked.

    Raises:
        ValueError: one line that names the key and what is allowed.
    """
    settings = config.evaluation
    _check_values(config)
    longest, rope = lengths_of(config)[-1], config.rope
    reach = longest_sequence(rope, FLAVORS[config.model.flavor].head_dim)
    if longest > max(reach, config.training.seq_len) and not rope.extrapolate:
        why = "longer than [rope] is meant for"
        allowed = f"at most {reach}, or rope.extrapolate = true"
        raise InvalidSetting("evaluation.lengths", settings.lengths, why, allowed)
    # Says which length is too short for a task, with this tokenizer.
    tokenizer = Tokenizer(config.model.hf_assets_path)
    encode = Encoder(tokenizer)
    hay = Haystack(encode, build_source(config, "evaluation", tokenizer), count=1)
    make_samples(config, encode, hay)


def check_has_weights(config: StripedJobConfig) -> None:
    """For an evaluation by itself: there must be something to measure.

    Raises:
        ValueError: the run has no checkpoint, and nothing that it starts from.
    """
    if checkpoint_to_load(config) is None and not loads_hf(config):
        folder = Path(config.job.dump_folder, config.checkpoint.folder)
        raise ValueError(
            f"{folder}: no checkpoint; train first, or load weights with "
            "--checkpoint.initial_load_in_hf or --checkpoint.initial_load_path"
        )


def _check_values(config: StripedJobConfig) -> None:
    settings = config.evaluation
    for name in ("freq", "samples", "short_context"):
        if getattr(settings, name) < 1:
            raise InvalidSetting(
                f"evaluation.{name}", getattr(settings, name), "out of range", "at least 1"
            )
    for name in ("texts", "seed"):
        if getattr(settings, name) < 0:
            raise InvalidSetting(
                f"evaluation.{name}", getattr(settings, name), "out of range", "at least 0"
            )
    texts = len(settings.tasks) * len(lengths_of(config)) * len(settings.depths) * settings.samples
    if max(texts, settings.texts) > _MOST_TEXTS:
        key = "samples" if texts > _MOST_TEXTS else "texts"
        why = f"tasks x lengths x depths x samples are {texts:,} texts"
        allowed = f"at most {_MOST_TEXTS:,} texts"
        raise InvalidSetting(f"evaluation.{key}", getattr(settings, key), why, allowed)
    if not set(settings.tasks) <= set(TASKS):
        raise InvalidSetting("evaluation.tasks", settings.tasks, "unknown task", choices(TASKS))
    if not settings.tasks and not settings.texts:
        why = "nothing to measure, evaluation.texts is 0"
        raise InvalidSetting("evaluation.tasks", settings.tasks, why, choices(TASKS))
    if not settings.depths or not all(0 <= depth <= 1 for depth in settings.depths):
        why = "a depth is a share of the text"
        raise InvalidSetting("evaluation.depths", settings.depths, why, "numbers from 0 to 1")
    if any(length < 1 for length in settings.lengths):
        raise InvalidSetting("evaluation.lengths", settings.lengths, "out of range", "at least 1")
    if config.parallelism.pipeline_parallel_degree > 1:
        why = "an evaluation needs the whole model on every rank, pipelines do not have it"
        degree = config.parallelism.pipeline_parallel_degree
        raise InvalidSetting("parallelism.pipeline_parallel_degree", degree, why, "1")
