"""Checks of each key by itself: ranges, names, and keys that would be ignored here.

Raises `InvalidSetting` like `recipes.preflight.checks`, which calls this.
"""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, get_type_hints

from recipes.config.ranges import TITAN, Range
from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting, choices, entry_of, toml

_FOLDERS_IN_DUMP_FOLDER = (
    "checkpoint.folder",
    "metrics.save_tb_folder",
    "profiling.save_traces_folder",
    "profiling.save_memory_snapshot_folder",
    "comm.save_traces_folder",
)
_ONE_OF: dict[str, tuple[str, ...]] = {
    "optimizer.name": ("Adam", "AdamW"),
    "model.converters": ("quantize.linear.float8", "quantize.linear.mx"),
    "compile.components": ("model", "loss"),
    "compile.backend": ("inductor", "aot_eager", "eager"),
    "checkpoint.exclude_from_loading": ("optimizer", "lr_scheduler", "dataloader", "train_state"),
    "activation_checkpoint.determinism_check": ("default", "none"),
    "parallelism.pipeline_parallel_schedule": (
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
    ),
}
# Keys of torchtitan 0.2.2 that would be ignored, or go wrong, here: the only value, and why.
_ONLY: dict[str, tuple[object, str]] = {
    "parallelism.context_parallel_rotate_method": ("", "set striped_cp.rotate_method instead"),
    "parallelism.expert_parallel_degree": (1, "the model has no experts"),
    "parallelism.expert_tensor_parallel_degree": (1, "the model has no experts"),
    "parallelism.expert_parallel_comm_backend": ("standard", "the model has no experts"),
    "parallelism.pipeline_parallel_schedule_csv": ("", "name a pipeline_parallel_schedule"),
    "debug.moe_force_load_balance": (False, "the model has no experts"),
    "fault_tolerance.enable": (False, "torchtitan's trainer reads it in an experiment only"),
    "memory_estimation.enable": (False, "run scripts/plan.py on this file instead"),
    "comm.mode": ("default", "run scripts/plan.py for a dry run"),
    "job.custom_config_module": ("", "add your fields to recipes/config/schema.py"),
    "experimental.custom_args_module": ("", "the schema is recipes/config/schema.py"),
    "checkpoint.initial_load_in_hf_quantized": (False, "weights are loaded in floating point"),
    "model.tokenizer_path": (None, "set model.hf_assets_path instead"),
    "optimizer.early_step_in_backward": (False, "gradients could not be clipped any more"),
    "training.dataloader.persistent_workers": (False, "the workers are threads"),
    "validation.dataloader.persistent_workers": (False, "the workers are threads"),
    "training.dataloader.pin_memory": (False, "a rank copies too few tokens to gain by it"),
    "validation.dataloader.pin_memory": (False, "a rank copies too few tokens to gain by it"),
}


def _own(schema: type, prefix: str = "") -> Iterator[tuple[str, Range]]:
    """(key, range) of the fields that have theirs beside them; ".*." for every entry."""
    kinds = get_type_hints(schema)
    for field in fields(schema):
        if isinstance(field.type, type) and is_dataclass(field.type):
            yield from _own(field.type, f"{prefix}{field.name}.")
        if (entry := entry_of(kinds[field.name])) is not None:
            yield from _own(entry, f"{prefix}{field.name}.*.")
        for mark in getattr(field.type, "__metadata__", ()):
            if isinstance(mark, Range):
                yield prefix + field.name, mark


_RANGES = [(key, mark) for mark, keys in TITAN.items() for key in keys]
_RANGES += _own(StripedJobConfig)


def allowed_values(key: str) -> str:
    """What `check_values` lets a key be, in words; empty where its type says it all."""
    if key in _ONLY:
        only, why = _ONLY[key]
        return f"{'unset' if only in ('', None) else toml(only)} alone: {why}"
    if key in _ONE_OF:
        return choices(_ONE_OF[key])
    texts = [mark.text for ranged, mark in _RANGES if ranged == key]
    texts += ["a folder in job.dump_folder"] if key in _FOLDERS_IN_DUMP_FOLDER else []
    return ", ".join(texts)


def get(config: object, key: str) -> Any:
    """Value of a dotted key; entries of a list have numbers from 1."""
    for part in key.split("."):
        config = config[int(part) - 1] if isinstance(config, list) else getattr(config, part)
    return config


def _each(config: StripedJobConfig) -> Iterator[tuple[str, Range]]:
    """(key, range) of every value that has a range."""
    for key, mark in _RANGES:
        array, star, name = key.partition(".*.")
        if not star:
            yield key, mark
            continue
        for number in range(1, len(get(config, array)) + 1):
            yield f"{array}.{number}.{name}", mark


def check_values(config: StripedJobConfig) -> None:
    """Check every key whose value can be judged without looking at another one."""
    for key, mark in _each(config):
        value = get(config, key)
        finite = not isinstance(value, float) or math.isfinite(value)
        if value is not None and not (finite and mark.fits(value)):
            raise InvalidSetting(key, value, "out of range", mark.text)
    for key in _FOLDERS_IN_DUMP_FOLDER:
        folder = PurePath(get(config, key))
        if not folder.name or folder.is_absolute() or ".." in folder.parts or "\0" in str(folder):
            allowed = "a relative path without .."
            raise InvalidSetting(key, str(folder), "not a folder in job.dump_folder", allowed)
    for key, names in _ONE_OF.items():
        value = get(config, key)
        if not set([value] if isinstance(value, str) else value) <= set(names):
            raise InvalidSetting(key, value, "unknown value", choices(names))
    for key, (only, why) in _ONLY.items():
        value = get(config, key)
        if value != only and (value or only):
            allowed_text = "leave it unset" if only in ("", None) else toml(only)
            raise InvalidSetting(key, value, f"not supported, {why}", allowed_text)
