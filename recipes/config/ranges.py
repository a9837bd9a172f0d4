"""Ranges of settings: beside the fields of this project's own schema, by key for torchtitan's."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Range(NamedTuple):
    """What a value must fit, and how a message says it; `field: Annotated[int, AT_LEAST_ONE]`."""

    fits: Callable[[Any], bool]
    text: str


AT_LEAST_ONE = Range(lambda v: v >= 1, "at least 1")
AT_LEAST_ZERO = Range(lambda v: v >= 0, "at least 0")
POSITIVE = Range(lambda v: v > 0, "above 0")
WEIGHT = Range(lambda v: 0 < v <= 1e100, "above 0 and at most 1e100")  # their sum is finite
BELOW_ONE = Range(lambda v: 0 <= v < 1, "at least 0 and below 1")
SHARE = Range(lambda v: 0 <= v <= 1, "0 to 1")
MINUS_ONE_OR_MORE = Range(lambda v: v == -1 or v >= 1, "-1 or at least 1")
MINUS_ONE_OR_ZERO_OR_MORE = Range(lambda v: v >= -1, "-1 or at least 0")
# One alone may be the one that is being written.
NOT_ONE = Range(lambda v: v == 0 or v >= 2, "0 for all, or at least 2")
SECONDS = Range(lambda v: 1 <= v <= 10**9, "1 to 1000000000")
NOT_EMPTY = Range(lambda v: bool(v) and all(v), "not empty")  # a text, or a list of them


def at_most(most: int) -> Range:
    """For what is made a number of times, or handed to C."""
    return Range(lambda v: v <= most, f"at most {most}")


_C_INT = at_most(2**31 - 1)
_SEQUENCES = at_most(2**20)
_WORKERS = at_most(1024)

# Of torchtitan 0.2.2's fields.
TITAN: dict[Range, tuple[str, ...]] = {
    AT_LEAST_ONE: (
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
        "training.dataloader.prefetch_factor",
        "validation.dataloader.prefetch_factor",
    ),
    AT_LEAST_ZERO: (
        "optimizer.lr",
        "optimizer.weight_decay",
        "lr_scheduler.warmup_steps",
        "profiling.profiler_warmup",
        "comm.trace_buf_size",
        "parallelism.pipeline_parallel_first_stage_less_layers",
        "parallelism.pipeline_parallel_last_stage_less_layers",
        "training.dataloader.num_workers",
        "validation.dataloader.num_workers",
        "debug.seed",
    ),
    POSITIVE: ("training.max_norm", "optimizer.eps"),
    BELOW_ONE: ("optimizer.beta1", "optimizer.beta2"),
    SHARE: (
        "lr_scheduler.decay_ratio",
        "lr_scheduler.min_lr_factor",
        "activation_checkpoint.memory_budget",
    ),
    MINUS_ONE_OR_MORE: (
        "training.global_batch_size",
        "parallelism.data_parallel_shard_degree",
        "validation.steps",
    ),
    NOT_ONE: ("checkpoint.keep_latest_k",),
    MINUS_ONE_OR_ZERO_OR_MORE: ("checkpoint.load_step",),
    SECONDS: ("comm.init_timeout_seconds", "comm.train_timeout_seconds"),
    NOT_EMPTY: ("job.dump_folder", "checkpoint.initial_load_path"),
    _C_INT: (
        "comm.trace_buf_size",
        "profiling.profile_freq",
        "profiling.profiler_active",
        "profiling.profiler_warmup",
    ),
    _SEQUENCES: (
        "training.local_batch_size",
        "validation.local_batch_size",
        "training.dataloader.prefetch_factor",
        "validation.dataloader.prefetch_factor",
    ),
    _WORKERS: ("training.dataloader.num_workers", "validation.dataloader.num_workers"),
}
