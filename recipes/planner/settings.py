"""From the sections of a TOML file to a `Run`, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recipes.config.schema import StripedJobConfig, compiles_model
from recipes.models.registry import shape_of
from recipes.parallel.degrees import gradient_accumulation, resolved_shard, stages_a_rank
from recipes.planner.hardware import Gpu
from recipes.planner.run import Levers, Run, check

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
_SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")


def run_from_config(
    config: StripedJobConfig, gpus: int, gpu: Gpu, documents: tuple[int, ...] = ()
) -> Run:
    """The run that `config` describes on `gpus` GPUs.

    Args:
        documents: lengths of the packed documents of every sequence; empty: one document, which is
            the most work a packing can be.

    Raises:
        ValueError: one line naming the setting; also for what the planner does not model.
    """
    run = replace(_as_written(config, gpu, documents), dp_shard=resolved_shard(config, gpus))
    passes = gradient_accumulation(
        config.training.global_batch_size, run.local_batch, run.data_parallel
    )
    check(run, gpu)
    return replace(run, gradient_accumulation=passes)


def run_to_search(config: StripedJobConfig, gpus: int, gpu: Gpu) -> tuple[Run, int | None]:
    """The run that `config` describes, on any mesh of `gpus` GPUs.

    Returns:
        The run, with all GPUs in dp_shard, and the sequences of a step that every mesh must keep:
        training.global_batch_size, or what the file's own mesh has; None where that mesh needs
        another number of GPUs.
    """
    written = _as_written(config, gpu, ())
    anywhere = replace(written, dp_replicate=1, dp_shard=gpus, cp=1, ulysses=1, tp=1, pp=1)
    total = config.training.global_batch_size
    if total != -1:
        return anywhere, total
    try:
        shard = resolved_shard(config, gpus)
    except ValueError:
        return anywhere, None
    return anywhere, replace(written, dp_shard=shard).sequences_per_step


def _as_written(config: StripedJobConfig, gpu: Gpu, documents: tuple[int, ...]) -> Run:
    parallelism, training = config.parallelism, config.training
    _refuse_unmodelled(config)
    shape = shape_of(config)
    return Run(
        shape,
        training.seq_len,
        local_batch=training.local_batch_size,
        documents=documents,
        dp_replicate=parallelism.data_parallel_replicate_degree,
        dp_shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        levers=_levers(config),
        kernel=_kernel(config, gpu),
        rotate_method=config.striped_cp.rotate_method,
        layout=parallelism.context_parallel_load_balancer,
        block_size=config.striped_cp.block_size,
        ulysses=config.striped_cp.ulysses_degree,
        parameter_bytes=_DTYPE_BYTES[training.dtype],
        float8="quantize.linear.float8" in config.model.converters,
        compiled=compiles_model(config),
        async_tp=parallelism.enable_async_tensor_parallel,
        loss_parallel=not parallelism.disable_loss_parallel,
        reshard_after_forward=parallelism.fsdp_reshard_after_forward,
        pp_schedule=parallelism.pipeline_parallel_schedule,
        pp_microbatch=parallelism.pipeline_parallel_microbatch_size,
        virtual_stages=stages_a_rank(config, shape.n_layers),
        deterministic_on=gpu.multiprocessors if config.debug.deterministic else 0,
    )


def settings_of(run: Run) -> dict[str, dict[str, Any]]:
    """The sections and keys in which runs found by a search differ."""
    levers = run.levers
    return {
        "training": {
            "local_batch_size": run.local_batch,
            "global_batch_size": run.sequences_per_step,
        },
        "parallelism": {
            "data_parallel_replicate_degree": run.dp_replicate,
            "data_parallel_shard_degree": run.dp_shard,
            "context_parallel_degree": run.cp,
            "tensor_parallel_degree": run.tp,
            "pipeline_parallel_degree": run.pp,
            "pipeline_parallel_microbatch_size": run.pp_microbatch,
        },
        "striped_cp": {"kernel": run.kernel, "ulysses_degree": run.ulysses},
        "activation_checkpoint": {
            "mode": levers.checkpointing,
            **({"selective_ac_option": "op"} if levers.checkpointing == "selective" else {}),
        },
        "memory": {
            "loss_chunk_tokens": levers.loss_chunk_tokens,
            "mlp_chunk_tokens": levers.mlp_chunk_tokens,
            "recompute_attention": levers.recompute_attention,
            "offload_checkpoints": levers.offload_checkpoints,
        },
    }


def _refuse_unmodelled(config: StripedJobConfig) -> None:
    schedule = config.parallelism.pipeline_parallel_schedule
    if config.parallelism.pipeline_parallel_degree > 1 and schedule not in _SCHEDULES:
        raise ValueError(
            f'parallelism.pipeline_parallel_schedule = "{schedule}": the planner knows '
            f"{', '.join(_SCHEDULES)}"
        )
    if config.activation_checkpoint.mode == "memory_budget":
        raise ValueError(
            'activation_checkpoint.mode = "memory_budget": the planner knows none, full, selective'
        )
    if config.training.enable_cpu_offload:
        raise ValueError("training.enable_cpu_offload = true: the planner does not model it")


def _levers(config: StripedJobConfig) -> Levers:
    mode = config.activation_checkpoint.mode
    option = config.activation_checkpoint.selective_ac_option
    if mode == "selective" and option != "op":
        mode = f"every_{option}"
    memory = config.memory
    return Levers(
        checkpointing=mode,
        recompute_attention=memory.recompute_attention,
        offload_checkpoints=memory.offload_checkpoints,
        loss_chunk_tokens=memory.loss_chunk_tokens,
        mlp_chunk_tokens=memory.mlp_chunk_tokens,
    )


def _kernel(config: StripedJobConfig, gpu: Gpu) -> str:
    """The kernel that runs: "auto" is the fastest of those that torch brings with it.

    cuDNN takes one document a row, and is not deterministic. Without a ring torch's own SDPA
    prefers it too (torchtitan 0.2.2, models/attention.py).
    """
    kernel = config.striped_cp.kernel
    if kernel != "auto":
        return kernel
    able = ["flash"] if config.documents.mask or config.debug.deterministic else ["cudnn", "flash"]
    known = [name for name in able if name in gpu.kernels]
    return max(known, key=lambda name: gpu.kernels[name].backward)
