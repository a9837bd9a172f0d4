"""Checks of the `[memory]` section: what its levers need, and what they cannot go together with.

Raises `InvalidSetting` like `recipes.preflight.checks`, which calls this.
"""

import os

from recipes.config.schema import StripedJobConfig, compiles_model
from recipes.config.types import InvalidSetting
from recipes.models.registry import shape_of
from recipes.parallel.degrees import stages_a_rank
from recipes.planner.footprint import GIB, in_flight_microbatches, pinned_bytes
from recipes.planner.run import Levers, Run


def check_memory(config: StripedJobConfig) -> None:
    """Check the levers against the settings that they build on."""
    settings = config.activation_checkpoint
    mode = f'activation_checkpoint.mode = "{settings.mode}"'
    by_operator = settings.mode == "selective" and settings.selective_ac_option == "op"
    if by_operator:
        mode += ' with selective_ac_option = "op"'
    whole_blocks = settings.mode in ("full", "selective") and not by_operator
    compiled = compiles_model(config)
    memory = config.memory

    if settings.debug and whole_blocks and not memory.recompute_attention:
        why = "torch has none for checkpoints that keep some outputs"
        allowed = "false, or memory.recompute_attention = true"
        raise InvalidSetting("activation_checkpoint.debug", True, why, allowed)
    if memory.recompute_attention and settings.mode in ("none", "memory_budget"):
        raise InvalidSetting("memory.recompute_attention", True, f"no effect with {mode}", "false")
    if memory.offload_checkpoints and not whole_blocks:
        allowed = 'false, or activation_checkpoint.mode = "full"'
        why = f"{mode} keeps more than block inputs"
        raise InvalidSetting("memory.offload_checkpoints", True, why, allowed)
    if memory.offload_checkpoints and compiled:
        why = 'copies cannot run inside blocks that compile.components = ["model"] compiles'
        allowed = "false, or compile.enable = false"
        raise InvalidSetting("memory.offload_checkpoints", True, why, allowed)
    if memory.mlp_chunk_tokens and (by_operator or settings.mode == "memory_budget"):
        why = f"{mode} keeps what the chunks are meant to drop"
        allowed = '0, or activation_checkpoint.mode = "full"'
        raise InvalidSetting("memory.mlp_chunk_tokens", memory.mlp_chunk_tokens, why, allowed)
    if memory.loss_chunk_tokens:
        _check_loss(config)


def _check_loss(config: StripedJobConfig) -> None:
    key, value = "memory.loss_chunk_tokens", config.memory.loss_chunk_tokens
    parallelism = config.parallelism
    if parallelism.disable_loss_parallel and parallelism.tensor_parallel_degree > 1:
        why = "chunks are sharded over the vocabulary, parallelism.disable_loss_parallel is true"
        raise InvalidSetting(key, value, why, "0, or disable_loss_parallel = false")
    for name in ("float8", "mx"):
        converter = f"quantize.linear.{name}"
        filters = getattr(config.quantize.linear, name).filter_fqns
        if converter in config.model.converters and "output" not in filters:
            why = f"{converter} would convert the output projection"
            raise InvalidSetting(key, value, why, f'0, or {converter}.filter_fqns = ["output"]')


def check_host_memory(config: StripedJobConfig) -> None:
    """Check that the checkpoints of all ranks of this host fit into its memory."""
    if not config.memory.offload_checkpoints:
        return
    # Imported late: it imports torch.
    from recipes.memory.offload import host_memory_available

    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    needed, available = ranks * offloaded_bytes_per_rank(config), host_memory_available()
    if needed > available:
        why = (
            f"the checkpoints of this host's {ranks} ranks take {needed / GIB:.1f} GiB of host "
            f"memory, {available / GIB:.1f} GiB are available"
        )
        raise InvalidSetting(
            "memory.offload_checkpoints", True, why, "false, or more ranks per sequence"
        )


def offloaded_bytes_per_rank(config: StripedJobConfig) -> float:
    """Host memory that the checkpoints of the fullest rank take."""
    parallelism, training = config.parallelism, config.training
    shape = shape_of(config)
    run = Run(
        shape,
        training.seq_len,
        local_batch=training.local_batch_size,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
        pp_schedule=parallelism.pipeline_parallel_schedule,
        pp_microbatch=parallelism.pipeline_parallel_microbatch_size,
        virtual_stages=stages_a_rank(config, shape.n_layers),
        levers=Levers(
            recompute_attention=config.memory.recompute_attention, offload_checkpoints=True
        ),
    )
    layers = in_flight_microbatches(run) * run.layers_per_rank
    # The planner counts in bfloat16.
    return layers * pinned_bytes(run) * (2 if training.mixed_precision_param == "float32" else 1)
