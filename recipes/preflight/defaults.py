"""Defaults give way to what was asked for: only two wishes of a user can contradict each other."""

from collections.abc import Callable
from typing import Any

from recipes.config.schema import StripedJobConfig
from recipes.config.types import toml
from recipes.config.values import get
from recipes.preflight.combinations import ZERO_BUBBLE


def give_way(config: StripedJobConfig, is_set: Callable[[str], bool]) -> list[str]:
    """Change the defaults that what was set cannot go with; what was changed and why, in lines.

    Args:
        is_set: whether the file or the command line has a key.
    """
    changed = []
    for key, value, because in _conflicts(config):
        if not is_set(key) and get(config, key) != value:
            changed.append(
                f"{key} = {toml(value)}, not its default {toml(get(config, key))}: {because}"
            )
            *path, name = key.split(".")
            setattr(get(config, ".".join(path)), name, value)
    return changed


def _conflicts(config: StripedJobConfig) -> list[tuple[str, Any, str]]:
    """Keys, the values that they must have, and what asks for it."""
    parallelism, training = config.parallelism, config.training
    conflicts: list[tuple[str, Any, str]] = []
    for converter in config.model.converters:
        if config.memory.loss_chunk_tokens and converter.startswith("quantize.linear."):
            why = f"memory.loss_chunk_tokens needs the output projection unconverted by {converter}"
            conflicts.append((f"{converter}.filter_fqns", ["output"], why))
    if parallelism.disable_loss_parallel and parallelism.tensor_parallel_degree > 1:
        why = "parallelism.disable_loss_parallel = true keeps the logits whole"
        conflicts.append(("memory.loss_chunk_tokens", 0, why))
    schedule = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_degree > 1 and schedule in ZERO_BUBBLE:
        why = f"schedule {schedule} goes backward twice"
        conflicts.append(("activation_checkpoint.mode", "none", why))
    shard = parallelism.data_parallel_shard_degree
    replicate = parallelism.data_parallel_replicate_degree
    split = parallelism.tensor_parallel_degree * parallelism.pipeline_parallel_degree > 1
    if split and shard == replicate == parallelism.context_parallel_degree == 1:
        why = "FSDP casts parameters, and nothing is sharded"
        conflicts.append(("training.mixed_precision_param", training.dtype, why))
    return conflicts
