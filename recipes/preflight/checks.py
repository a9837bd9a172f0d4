"""Checks of a configuration: what fits together.

Every check raises `InvalidSetting`; `recipes.config.load` adds where the setting came from. They
all run before a process group exists, on every rank alike.
"""

import os

from recipes.config.schema import StripedJobConfig, compiles_model
from recipes.config.types import CannotRun, InvalidSetting, toml
from recipes.config.values import check_values
from recipes.models.registry import MODELS, family_of, shape_of
from recipes.parallel.degrees import (
    check_heads,
    check_length,
    check_ulysses,
    gradient_accumulation,
    resolved_shard,
)
from recipes.parallel.ring import layout_of
from recipes.preflight.combinations import check_combinations, check_combinations_at_launch
from recipes.preflight.host import check_host
from recipes.preflight.levers import check_host_memory, check_memory


def check_config(config: StripedJobConfig) -> None:
    """Check everything that the configuration says by itself."""
    check_values(config)
    _check_names(config)
    _check_activation_checkpoint(config)
    low, high = config.rope.low_freq_factor, config.rope.high_freq_factor
    if low >= high:
        allowed = f"below rope.high_freq_factor = {high}"
        raise InvalidSetting("rope.low_freq_factor", low, "the two factors cross", allowed)
    _check_sequence(config)
    check_combinations(config)
    _check_tools(config)
    check_memory(config)


def _check_names(config: StripedJobConfig) -> None:
    name, flavor = config.model.name, config.model.flavor
    if name not in MODELS:
        raise InvalidSetting("model.name", name, "unknown value", ", ".join(map(toml, MODELS)))
    if flavor not in MODELS[name].flavors:
        allowed = ", ".join(map(toml, MODELS[name].flavors))
        raise InvalidSetting("model.flavor", flavor, f"no size of {name}", allowed)


def _check_activation_checkpoint(config: StripedJobConfig) -> None:
    settings = config.activation_checkpoint
    option = settings.selective_ac_option
    if option != "op" and not (option.isdecimal() and option.isascii() and int(option) >= 1):
        key = "activation_checkpoint.selective_ac_option"
        raise InvalidSetting(key, option, "unknown value", '"op", or every how many blocks: "2"')
    if settings.mode == "memory_budget" and not compiles_model(config):
        allowed = '"none", "full", "selective", or compile.enable = true with component "model"'
        key = "activation_checkpoint.mode"
        raise InvalidSetting(key, settings.mode, "needs a compiled model", allowed)


def _check_sequence(config: StripedJobConfig) -> None:
    shape, parallelism = shape_of(config), config.parallelism
    balancer, block_size = parallelism.context_parallel_load_balancer, config.striped_cp.block_size
    if block_size != 1 and balancer != "striped":
        why = f"only stripes have a size, context_parallel_load_balancer is {toml(balancer)}"
        raise InvalidSetting("striped_cp.block_size", block_size, why, "1")
    if block_size != 1 and shape.windowed:
        why = f"flavor {toml(config.model.flavor)} has sliding windows, which need token stripes"
        raise InvalidSetting("striped_cp.block_size", block_size, why, "1")
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    check_heads(shape.n_kv_heads, tp)
    check_ulysses(config.striped_cp.ulysses_degree, shape.n_heads, cp, tp)
    seq_len = config.training.seq_len
    _check_divides(config, "training.seq_len", seq_len)
    if config.validation.enable and config.validation.seq_len != -1:
        key, value = "validation.seq_len", config.validation.seq_len
        if value > seq_len:
            allowed = f"at most {seq_len}, or -1 for the same"
            raise InvalidSetting(key, value, "longer than training.seq_len", allowed)
        _check_divides(config, key, value)


def _check_divides(config: StripedJobConfig, key: str, seq_len: int) -> None:
    parallelism = config.parallelism
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    check_length(key, seq_len, layout_of(config), cp, tp, config.striped_cp.ulysses_degree)


def _check_tools(config: StripedJobConfig) -> None:
    profiling = config.profiling
    cycle = profiling.profiler_warmup + profiling.profiler_active
    if profiling.enable_profiling and profiling.profile_freq < cycle:
        why = "shorter than profiler_warmup + profiler_active"
        key = "profiling.profile_freq"
        raise InvalidSetting(key, profiling.profile_freq, why, f"at least {cycle}")
    if config.parallelism.enable_async_tensor_parallel and not (
        compiles_model(config) and config.parallelism.tensor_parallel_degree > 1
    ):
        why = "needs tensor_parallel_degree above 1 and a compiled model"
        key = "parallelism.enable_async_tensor_parallel"
        raise InvalidSetting(key, True, why, "false")


def check_launch(config: StripedJobConfig, world_size: int) -> None:
    """Check what depends on the number of ranks, on the model, and on files of this host."""
    shard = resolved_shard(config, world_size)
    data_parallel = config.parallelism.data_parallel_replicate_degree * shard
    training = config.training
    gradient_accumulation(training.global_batch_size, training.local_batch_size, data_parallel)
    _check_files(config)
    # Imported late: torch and `datasets` take long, and the planner needs none of it.
    from recipes.checkpoint.files import check_checkpoint_files
    from recipes.models.decoder.rope import check_sequence_length
    from recipes.preflight.data import check_data
    from recipes.preflight.evaluation import check_evaluation
    from recipes.preflight.weights import check_weights

    shape, theta = shape_of(config), family_of(config).theta
    try:
        check_weights(config)  # may take the RoPE settings from the weights
        check_sequence_length(config.rope, shape.head_dim, theta, training.seq_len)
        check_combinations_at_launch(config, shard)
        check_checkpoint_files(config)
        check_data(config, data_parallel)
        if config.evaluation.enable:
            check_evaluation(config)
        check_host_memory(config)
        check_host(config)
    except InvalidSetting:
        raise
    except ValueError as error:
        raise CannotRun(error) from None
    if config.checkpoint.create_seed_checkpoint and world_size != 1:
        why = f"a seed checkpoint is made by one rank, WORLD_SIZE is {world_size}"
        raise InvalidSetting("checkpoint.create_seed_checkpoint", True, why, "false")


def _check_files(config: StripedJobConfig) -> None:
    path = config.model.hf_assets_path
    if not os.path.isdir(path):
        allowed = "a folder with tokenizer.json"
        where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
        raise InvalidSetting("model.hf_assets_path", path, f"no such folder{where}", allowed)
    checkpoint = config.checkpoint
    unset = {
        "initial_load_path": None,
        "initial_load_in_hf": False,
        "last_save_in_hf": False,
        "create_seed_checkpoint": False,
        "load_step": -1,
    }
    for name, default in unset.items():
        value = getattr(checkpoint, name)
        if value != default and not checkpoint.enable:
            why = "has no effect while checkpoint.enable is false"
            raise InvalidSetting(f"checkpoint.{name}", value, why, "set checkpoint.enable = true")
    load_path = checkpoint.initial_load_path
    if load_path and "://" not in load_path and not os.path.isdir(load_path):
        allowed = "the folder of one step of a checkpoint"
        raise InvalidSetting("checkpoint.initial_load_path", load_path, "no such folder", allowed)
