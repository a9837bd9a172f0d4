"""Startup checks of the `[evaluation]` section."""

from pathlib import Path

from recipes.checkpoint.files import checkpoint_to_load
from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting, choices
from recipes.data.dataset import build_source
from recipes.data.tokens import Tokenizer
from recipes.evaluation.evaluator import lengths_of, list_cases
from recipes.evaluation.haystack import Encoder, Haystack
from recipes.evaluation.tasks import TASKS
from recipes.models.decoder.rope import longest_sequence
from recipes.models.registry import family_of, shape_of
from recipes.preflight.weights import loads_hf

# Held in memory: results of the samples, tokens of the texts.
_MOST_SAMPLES = 100_000
_MOST_TOKENS = 2**30
# No two samples of a task differ by so many tokens in what stands beside the text.
_SPREAD = 1000


def check_evaluation(config: StripedJobConfig) -> None:
    """Check what an evaluation needs; reads a little of its text. The dataset has been checked.

    Raises:
        ValueError: one line that names the key and what is allowed.
    """
    settings = config.evaluation
    _check_values(config)
    longest, rope = lengths_of(config)[-1], config.rope
    reach = longest_sequence(rope, shape_of(config).head_dim, family_of(config).theta)
    if longest > max(reach, config.training.seq_len) and not rope.extrapolate:
        why = "longer than [rope] is meant for"
        allowed = f"at most {reach}, or rope.extrapolate = true"
        raise InvalidSetting("evaluation.lengths", settings.lengths, why, allowed)
    tokenizer = Tokenizer(config.model.hf_assets_path)
    encode = Encoder(tokenizer)
    hay = Haystack(encode, build_source(config, "evaluation", tokenizer), count=1)
    # Says which length is too short for a task, with this tokenizer; much longer ones are not.
    cases = list_cases(config)
    shortest = min((case.length for case in cases), default=0)
    for case in cases:
        if case.length < shortest + _SPREAD:
            case.make(encode, hay)


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
    if not set(settings.tasks) <= set(TASKS):
        raise InvalidSetting("evaluation.tasks", settings.tasks, "unknown task", choices(TASKS))
    if not settings.tasks and not settings.texts:
        why = "nothing to measure, evaluation.texts is 0"
        raise InvalidSetting("evaluation.tasks", settings.tasks, why, choices(TASKS))
    if not settings.depths or not all(0 <= depth <= 1 for depth in settings.depths):
        why = "a depth is a share of the text"
        raise InvalidSetting("evaluation.depths", settings.depths, why, "numbers from 0 to 1")
    lengths = lengths_of(config)
    if not 1 <= lengths[0] <= lengths[-1] <= _MOST_TOKENS:
        allowed = f"1 to {_MOST_TOKENS}"
        raise InvalidSetting("evaluation.lengths", settings.lengths, "out of range", allowed)
    if settings.texts * lengths[-1] > _MOST_TOKENS:
        why = f"too many texts of {lengths[-1]} tokens"
        allowed = f"at most {_MOST_TOKENS // lengths[-1]}"
        raise InvalidSetting("evaluation.texts", settings.texts, why, allowed)
    grid = len(settings.tasks) * len(lengths) * len(settings.depths)
    if grid * settings.samples > _MOST_SAMPLES:
        why = f"too many for {grid} times tasks, lengths and depths"
        allowed = f"at most {_MOST_SAMPLES // grid}"
        raise InvalidSetting("evaluation.samples", settings.samples, why, allowed)
    if config.parallelism.pipeline_parallel_degree > 1:
        why = "an evaluation needs the whole model on every rank, pipelines do not have it"
        degree = config.parallelism.pipeline_parallel_degree
        raise InvalidSetting("parallelism.pipeline_parallel_degree", degree, why, "1")
