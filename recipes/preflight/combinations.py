"""Checks of parallelisms, precision and compilation against each other.

What cannot work together is refused with a line that names both settings. Every check raises
`InvalidSetting` like `recipes.preflight.checks`, which calls this; the table is in
docs/reference/parallelism.md.
"""

from importlib.metadata import version

from recipes.config.schema import StripedJobConfig, compiles_model
from recipes.config.types import InvalidSetting, toml
from recipes.config.values import get
from recipes.models.registry import shape_of
from recipes.parallel.degrees import (
    SCHEDULE,
    check_microbatches,
    check_stage_count,
    check_stages,
    less_layers,
    stages_a_rank,
)

ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble")
_FLOAT8 = "quantize.linear.float8"


def check_combinations(config: StripedJobConfig) -> None:
    """Check what the configuration says by itself."""
    if config.parallelism.pipeline_parallel_degree > 1:
        parallelism = config.parallelism
        check_microbatches(
            parallelism.pipeline_parallel_schedule,
            config.training.local_batch_size,
            parallelism.pipeline_parallel_microbatch_size,
            parallelism.pipeline_parallel_degree,
        )
        _check_validation_of_pipeline(config)
        _check_zero_bubble(config)
    _check_float8(config)
    _check_determinism(config)


def check_combinations_at_launch(config: StripedJobConfig, shard: int) -> None:
    """Check what depends on the number of ranks, on the model, and on the device of this host.

    Args:
        shard: the data-parallel shard degree, -1 resolved.
    """
    if config.parallelism.pipeline_parallel_degree > 1:
        _check_stages(config)
    if shard * config.parallelism.context_parallel_degree == 1:
        _check_without_fsdp(config)
    _check_device(config)


def _check_validation_of_pipeline(config: StripedJobConfig) -> None:
    validation = config.validation
    if not validation.enable:
        return
    # The stages allocate their receive buffers once, for the shapes of training.
    for name in ("seq_len", "local_batch_size"):
        value, training = getattr(validation, name), getattr(config.training, name)
        if value not in (-1, training):
            why = f"pipeline stages take only training.{name}"
            raise InvalidSetting(f"validation.{name}", value, why, f"{training} or -1")
    schedule = config.parallelism.pipeline_parallel_schedule
    if schedule == "ZBVZeroBubble":
        # torch 2.13: "can't steal_bwd_input if this stage doesn't have backward".
        why = "cannot run forward alone, validation.enable is true"
        allowed = "another schedule, or validation.enable = false"
        raise InvalidSetting(SCHEDULE, schedule, why, allowed)


def _check_zero_bubble(config: StripedJobConfig) -> None:
    """These schedules go backward through a stage twice: for its input, then for its weights."""
    schedule = config.parallelism.pipeline_parallel_schedule
    if schedule not in ZERO_BUBBLE:
        return
    for key, off in (
        ("activation_checkpoint.mode", "none"),
        ("memory.mlp_chunk_tokens", 0),
    ):
        value = get(config, key)
        if value != off:
            why = f"what {key} = {toml(value)} drops would be computed twice"
            allowed = f"{key} = {toml(off)}, or another schedule"
            raise InvalidSetting(SCHEDULE, schedule, why, allowed)
    if compiles_model(config):
        why = 'compile.components = ["model"] makes one backward pass of the two'
        raise InvalidSetting(SCHEDULE, schedule, why, "compile.enable = false, or another")
    torch = version("torch")
    if tuple(map(int, torch.split(".")[:2])) < (2, 13):
        why = f"torch {torch} takes the documents of a stage for a tensor there"
        raise InvalidSetting(SCHEDULE, schedule, why, "another schedule, or torch 2.13 and later")


def _check_stages(config: StripedJobConfig) -> None:
    """Check that every stage gets a part of the model, as torchtitan 0.2.2 deals it out."""
    layers = shape_of(config).n_layers
    parallelism = config.parallelism
    if shape_of(config).tied:
        key, pp = "parallelism.pipeline_parallel_degree", parallelism.pipeline_parallel_degree
        why = f"{config.model.flavor} has one matrix for both ends, which no one rank would hold"
        raise InvalidSetting(key, pp, why, "1")
    parts = parallelism.module_fqns_per_model_part
    if parts is not None:
        _check_parts(config, parts, layers)
        return
    pp = parallelism.pipeline_parallel_degree
    stages = pp * stages_a_rank(config, layers)
    check_stages(parallelism.pipeline_parallel_schedule, pp, stages, layers, less_layers(config))


def _check_parts(config: StripedJobConfig, parts: list[list[str]], layers: int) -> None:
    """Check that every module has its stage: torchtitan 0.2.2 trains without those it misses."""
    key = "parallelism.module_fqns_per_model_part"
    modules = ["tok_embeddings", *(f"layers.{i}" for i in range(layers)), "norm", "output"]
    named = [name for part in parts for name in part]
    if named != modules:
        odd = sorted(set(named) ^ set(modules))
        why = f"wrong or missing: {', '.join(odd)}" if odd else "twice, or not in order"
        allowed = f"tok_embeddings, layers.0 to layers.{layers - 1}, norm, output, in this order"
        raise InvalidSetting(key, parts, why, allowed)
    check_stage_count(config, key, len(parts))


def _check_without_fsdp(config: StripedJobConfig) -> None:
    """Check what only FSDP does, which shards over data-parallel and context-parallel ranks."""
    training, parallelism = config.training, config.parallelism
    allowed = "data_parallel_shard_degree or context_parallel_degree above 1"
    if training.enable_cpu_offload:
        why = "FSDP offloads, and nothing is sharded"
        raise InvalidSetting("training.enable_cpu_offload", True, why, f"false, or {allowed}")
    reshard = parallelism.fsdp_reshard_after_forward
    if reshard != "default":
        key, why = "parallelism.fsdp_reshard_after_forward", "nothing is sharded"
        raise InvalidSetting(key, reshard, why, f'"default", or {allowed}')
    precision = training.mixed_precision_param
    for name in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        degree = getattr(parallelism, name)
        if degree > 1 and precision != training.dtype:
            # torchtitan 0.2.2 would go on without mixed precision, after a warning.
            why = f"FSDP casts parameters, parallelism.{name} = {degree} alone has none"
            allowed = f'"{training.dtype}" as training.dtype, or {allowed}'
            raise InvalidSetting("training.mixed_precision_param", precision, why, allowed)


def _check_float8(config: StripedJobConfig) -> None:
    converters = config.model.converters
    if len(converters) > 1:
        why = "a layer is converted once"
        raise InvalidSetting("model.converters", converters, why, "one of them")
    if _FLOAT8 not in converters:
        return
    # torch's scaled matrix products (2.13) take rows and columns in multiples of 16.
    degree = config.parallelism.context_parallel_degree * config.parallelism.tensor_parallel_degree
    rows, rest = divmod(config.training.local_batch_size * config.training.seq_len, degree)
    if rest or rows % 16:
        why = f"float8 needs rows per rank in multiples of 16, there are {rows} on {degree} ranks"
        allowed = f"multiples of {16 * degree}, or no converter"
        raise InvalidSetting("training.seq_len", config.training.seq_len, why, allowed)
    float8 = config.quantize.linear.float8
    for name in ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp"):
        if getattr(float8, name) and float8.recipe_name is not None:
            why = f"a recipe has its own scaling, recipe_name is {toml(float8.recipe_name)}"
            raise InvalidSetting(f"{_FLOAT8}.{name}", True, why, "false, or recipe_name unset")
    if float8.precompute_float8_dynamic_scale_for_fsdp and not float8.enable_fsdp_float8_all_gather:
        key = f"{_FLOAT8}.precompute_float8_dynamic_scale_for_fsdp"
        allowed = "false, or enable_fsdp_float8_all_gather = true"
        raise InvalidSetting(key, True, "enable_fsdp_float8_all_gather is false", allowed)
    if float8.emulate and compiles_model(config):
        why = 'torchao emulates in eager mode, compile.components has "model"'
        raise InvalidSetting(f"{_FLOAT8}.emulate", True, why, "false, or compile.enable = false")


def _check_determinism(config: StripedJobConfig) -> None:
    debug, kernel = config.debug, config.striped_cp.kernel
    if kernel == "cudnn" and debug.deterministic and not debug.deterministic_warn_only:
        why = "its backward pass is not deterministic, debug.deterministic is true"
        allowed = '"auto", "flash", "flex", or debug.deterministic = false'
        raise InvalidSetting("striped_cp.kernel", kernel, why, allowed)


def _check_device(config: StripedJobConfig) -> None:
    """Check that the device of this host has the arithmetic of the converters."""
    if not config.model.converters:
        return
    # Imported late: it imports torch.
    from torchtitan.tools.utils import has_cuda_capability

    emulated = config.quantize.linear.float8.emulate
    if _FLOAT8 in config.model.converters and not (emulated or has_cuda_capability(8, 9)):
        why = "float8 needs a GPU of compute capability 8.9"
        allowed = f"none, or {_FLOAT8}.emulate = true to try it"
        raise InvalidSetting("model.converters", config.model.converters, why, allowed)
    if "quantize.linear.mx" in config.model.converters and not has_cuda_capability(10, 0):
        why = "MXFP8 needs a GPU of compute capability 10.0"
        raise InvalidSetting("model.converters", config.model.converters, why, "none")
