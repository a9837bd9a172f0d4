"""Checks of each key by itself: ranges, names, and keys that would be ignored here.

Raises `InvalidSetting` like `recipes.preflight.checks`, which calls this.
"""

import math
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting, choices, toml

_AT_LEAST_ONE = (
    "training.seq_len",
    "training.local_batch_size",
    "training.steps",
    "training.gc_freq",
    "lr_scheduler.total_steps",
    "metrics.log_freq",
    "profiling.profile_freq",
    "profiling.profiler_active",
    "checkpoint.interval",
    "validation.freq",
    "parallelism.data_parallel_replicate_degree",
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_layers_per_stage",
    "striped_cp.block_size",
    "rope.scaling_factor",
    "rope.original_max_position_embeddings",
    "training.dataloader.prefetch_factor",
    "validation.dataloader.prefetch_factor",
)
_AT_LEAST_ZERO = (
    "optimizer.lr",
    "optimizer.weight_decay",
    "lr_scheduler.warmup_steps",
    "profiling.profiler_warmup",
    "checkpoint.keep_latest_k",
    "comm.trace_buf_size",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "training.dataloader.num_workers",
    "validation.dataloader.num_workers",
    "documents.shuffle_seed",
    "debug.seed",
    "memory.loss_chunk_tokens",
    "memory.mlp_chunk_tokens",
)
_POSITIVE = (
    "training.max_norm",
    "optimizer.eps",
    "rope.theta",
    "rope.low_freq_factor",
    "rope.high_freq_factor",
)
_BELOW_ONE = ("optimizer.beta1", "optimizer.beta2")
_SHARE = (
    "lr_scheduler.decay_ratio",
    "lr_scheduler.min_lr_factor",
    "activation_checkpoint.memory_budget",
)
_MINUS_ONE_OR_AT_LEAST_ONE = (
    "training.global_batch_size",
    "parallelism.data_parallel_shard_degree",
    "validation.steps",
    "validation.seq_len",
    "validation.local_batch_size",
)
_MINUS_ONE_OR_AT_LEAST_ZERO = ("checkpoint.load_step",)
# What is made for each of them costs memory, or is a number of C.
_AT_MOST = {
    "training.local_batch_size": 2**20,
    "validation.local_batch_size": 2**20,
    "training.dataloader.num_workers": 1024,
    "validation.dataloader.num_workers": 1024,
    "training.dataloader.prefetch_factor": 2**20,
    "validation.dataloader.prefetch_factor": 2**20,
    "comm.trace_buf_size": 2**31 - 1,
    "profiling.profile_freq": 2**31 - 1,
    "profiling.profiler_active": 2**31 - 1,
    "profiling.profiler_warmup": 2**31 - 1,
}
_SECONDS = ("comm.init_timeout_seconds", "comm.train_timeout_seconds")
_NOT_EMPTY = (
    "job.dump_folder",
    "model.hf_assets_path",
    "training.text_column",
    "validation.text_column",
    "checkpoint.initial_load_path",
)
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
    "job.custom_config_module": (
        "",
        "add your fields to recipes/config/schema.py",
    ),
    "experimental.custom_args_module": ("", "the schema is recipes/config/schema.py"),
    "model.tokenizer_path": (None, "set model.hf_assets_path instead"),
    "optimizer.early_step_in_backward": (False, "gradients could not be clipped any more"),
    "training.dataloader.persistent_workers": (False, "the workers are threads"),
    "validation.dataloader.persistent_workers": (False, "the workers are threads"),
    "training.dataloader.pin_memory": (False, "a rank copies too few tokens to gain by it"),
    "validation.dataloader.pin_memory": (False, "a rank copies too few tokens to gain by it"),
}


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_AT_LEAST_ONE, lambda v: v >= 1, "at least 1"),
    (_AT_LEAST_ZERO, lambda v: v >= 0, "at least 0"),
    (_POSITIVE, lambda v: v > 0, "above 0"),
    (_BELOW_ONE, lambda v: 0 <= v < 1, "at least 0 and below 1"),
    (_SHARE, lambda v: 0 <= v <= 1, "0 to 1"),
    (_MINUS_ONE_OR_AT_LEAST_ONE, lambda v: v == -1 or v >= 1, "-1 or at least 1"),
    (_MINUS_ONE_OR_AT_LEAST_ZERO, lambda v: v >= -1, "-1 or at least 0"),
    (_SECONDS, lambda v: 1 <= v <= 10**9, "1 to 1000000000"),
)


def allowed_values(key: str) -> str:
    """What `check_values` lets a key be, in words; empty where its type says it all."""
    if key in _ONLY:
        only, why = _ONLY[key]
        return f"{'unset' if only in ('', None) else toml(only)} alone: {why}"
    if key in _ONE_OF:
        return choices(_ONE_OF[key])
    texts = [text for keys, _, text in _RULES if key in keys]
    texts += [f"at most {_AT_MOST[key]}"] if key in _AT_MOST else []
    texts += ["a folder in job.dump_folder"] if key in _FOLDERS_IN_DUMP_FOLDER else []
    texts += ["not empty"] if key in _NOT_EMPTY else []
    return ", ".join(texts)


def get(config: object, key: str) -> Any:
    """Value of a dotted key."""
    for part in key.split("."):
        config = getattr(config, part)
    return config


def check_values(config: StripedJobConfig) -> None:
    """Check every key whose value can be judged without looking at another one."""
    _check_ranges(config)
    _check_choices(config)


def _check_ranges(config: StripedJobConfig) -> None:
    for keys, fits, allowed in _RULES:
        for key in keys:
            value = get(config, key)
            if value is not None and not (math.isfinite(value) and fits(value)):
                raise InvalidSetting(key, value, "out of range", allowed)
    for key, most in _AT_MOST.items():
        value = get(config, key)
        if value is not None and value > most:
            raise InvalidSetting(key, value, "out of range", f"at most {most}")
    for key in _NOT_EMPTY:
        if get(config, key) == "":
            raise InvalidSetting(key, "", "empty", "a name")
    for key in _FOLDERS_IN_DUMP_FOLDER:
        folder = PurePath(get(config, key))
        if not folder.name or folder.is_absolute() or ".." in folder.parts or "\0" in str(folder):
            allowed = "a relative path without .."
            raise InvalidSetting(key, str(folder), "not a folder in job.dump_folder", allowed)
    if config.checkpoint.keep_latest_k == 1:
        why = "the one that is kept may be the one that is being written"
        raise InvalidSetting("checkpoint.keep_latest_k", 1, why, "0 for all, or at least 2")


def _check_choices(config: StripedJobConfig) -> None:
    for key, allowed in _ONE_OF.items():
        value = get(config, key)
        if not set([value] if isinstance(value, str) else value) <= set(allowed):
            raise InvalidSetting(key, value, "unknown value", choices(allowed))
    for key, (only, why) in _ONLY.items():
        value = get(config, key)
        if value != only and (value or only):
            allowed_text = "leave it unset" if only in ("", None) else toml(only)
            raise InvalidSetting(key, value, f"not supported, {why}", allowed_text)
