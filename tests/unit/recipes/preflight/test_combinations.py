"""What cannot work together is refused at startup, in one line that names both settings."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from recipes.preflight import load_config

PP2 = "--parallelism.pipeline_parallel_degree 2 --training.local_batch_size 4"
TP2 = "--parallelism.tensor_parallel_degree 2"
CP2 = "--parallelism.context_parallel_degree 2"
SCHEDULE = "--parallelism.pipeline_parallel_schedule"
FULL = "--activation_checkpoint.mode full"
COMPILE = "--compile.enable --compile.components model"
FLOAT8 = "--model.converters quantize.linear.float8 --quantize.linear.float8.filter_fqns output"
EMULATED = f"{FLOAT8} --quantize.linear.float8.emulate"
ROWWISE = "--quantize.linear.float8.recipe_name rowwise"
GATHER = "--quantize.linear.float8.enable_fsdp_float8_all_gather"
PRECOMPUTE = "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
BFLOAT16 = "--training.mixed_precision_param bfloat16"
LAYERS, END = [f"layers.{i}" for i in range(4)], ["norm", "output"]
# settings, number of ranks, and what the one line names
REFUSED = [
    (f"{PP2} {SCHEDULE} ZBVZeroBubble {FULL}", 2, ["ZBVZeroBubble", "activation_checkpoint.mode"]),
    (
        f"{PP2} {SCHEDULE} InterleavedZeroBubble --memory.mlp_chunk_tokens 8",
        2,
        ["InterleavedZeroBubble", "memory.mlp_chunk_tokens"],
    ),
    (f"{PP2} {SCHEDULE} ZBVZeroBubble {COMPILE}", 2, ["ZBVZeroBubble", "compile.components"]),
    (f"{PP2} {SCHEDULE} ZBVZeroBubble --validation.enable", 2, ["ZBV", "validation.enable"]),
    (f"{PP2} --validation.enable --validation.seq_len 32", 2, ["validation.seq_len", "training"]),
    (
        f"{PP2} --parallelism.pipeline_parallel_microbatch_size 3",
        2,
        ["pipeline_parallel_microbatch_size = 3", "training.local_batch_size = 4"],
    ),
    (
        f"{PP2} --parallelism.pipeline_parallel_microbatch_size 4",
        2,
        ['pipeline_parallel_schedule = "1F1B"', "training.local_batch_size = 4"],
    ),
    (
        f"{PP2} {SCHEDULE} Interleaved1F1B --training.local_batch_size 5",
        2,
        ["Interleaved1F1B", "training.local_batch_size = 5"],
    ),
    (
        f"{PP2} --parallelism.pipeline_parallel_layers_per_stage 1",
        2,
        ["pipeline_parallel_layers_per_stage = 1", "1F1B"],
    ),
    (
        "--parallelism.pipeline_parallel_degree 4 --training.local_batch_size 4 "
        f"{SCHEDULE} Interleaved1F1B",
        4,
        ["pipeline_parallel_degree = 4", "Interleaved1F1B", "the 4 layers"],
    ),
    (f"{TP2} {BFLOAT16}", 2, ["training.mixed_precision_param", "tensor_parallel_degree = 2"]),
    (f"{PP2} {BFLOAT16}", 2, ["training.mixed_precision_param", "pipeline_parallel_degree = 2"]),
    (
        f"{TP2} --training.enable_cpu_offload",
        2,
        ["training.enable_cpu_offload", "context_parallel_degree"],
    ),
    (
        f"{TP2} --parallelism.fsdp_reshard_after_forward never",
        2,
        ["fsdp_reshard_after_forward", "context_parallel_degree"],
    ),
    (f"{CP2} {FLOAT8}", 2, ["model.converters", "quantize.linear.float8.emulate"]),
    (f"{CP2} {EMULATED} {COMPILE}", 2, ["float8.emulate", "compile.components"]),
    (f"{CP2} {EMULATED} {ROWWISE} {GATHER}", 2, ["float8_all_gather", "recipe_name"]),
    (f"{CP2} {EMULATED} {PRECOMPUTE}", 2, ["precompute_float8", "enable_fsdp_float8_all_gather"]),
    (f"{CP2} --model.converters quantize.linear.mx", 2, ["model.converters", "MXFP8"]),
    (
        f"{CP2} {EMULATED} --quantize.linear.float8.filter_fqns wq",
        2,
        ["memory.loss_chunk_tokens", "quantize.linear.float8"],
    ),
    (
        f"{TP2} --parallelism.disable_loss_parallel --memory.loss_chunk_tokens 2048",
        2,
        ["memory.loss_chunk_tokens", "disable_loss_parallel"],
    ),
    (f"{CP2} {FULL} {COMPILE} --memory.offload_checkpoints", 2, ["offload", "compile.components"]),
    (
        f"{TP2} --parallelism.data_parallel_replicate_degree 2 "
        "--parallelism.data_parallel_shard_degree 1",
        4,
        ["data_parallel_replicate_degree = 2", "data_parallel_shard_degree"],
    ),
    (f"{TP2} {CP2} --training.seq_len 66", 4, ["seq_len = 66", "multiples of 4", "64 and 68"]),
    (f"{CP2} --training.seq_len 65", 2, ["seq_len = 65", "multiples of 2", "64 and 66"]),
    (
        f"{CP2} --training.seq_len 66 --striped_cp.block_size 8",
        2,
        ["seq_len = 66", "striped_cp.block_size = 8", "64 and 80"],
    ),
    (
        "--parallelism.enable_async_tensor_parallel",
        1,
        ["enable_async_tensor_parallel", "tensor_parallel_degree"],
    ),
    (
        f"{CP2} --striped_cp.kernel cudnn --debug.deterministic",
        2,
        ['striped_cp.kernel = "cudnn"', "debug.deterministic"],
    ),
]
ACCEPTED = [
    (f"{CP2} --training.seq_len 6", 2),
    ("--parallelism.context_parallel_degree 3 --training.seq_len 9", 3),
    (f"{TP2} {CP2} --training.seq_len 12", 4),
    (f"{TP2} {CP2} {BFLOAT16}", 4),
    (f"{TP2} {BFLOAT16} --training.dtype bfloat16", 2),
    pytest.param(
        f"{PP2} {SCHEDULE} ZBVZeroBubble",
        2,
        marks=pytest.mark.skipif(
            tuple(map(int, version("torch").split(".")[:2])) < (2, 13), reason="refused"
        ),
    ),
]


def load(settings: str, ranks: int) -> None:
    base = ["--job.config_file", "train_configs/debug_cpu.toml", "--training.seq_len", "64"]
    first = ["--parallelism.context_parallel_degree", "1"]
    load_config([*base, *first, *settings.split()], ranks)


@pytest.mark.parametrize(("settings", "ranks", "named"), REFUSED)
def test_refused(settings: str, ranks: int, named: list[str]) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011
        load(settings, ranks)
    (line,) = str(refusal.value).splitlines()
    for part in [*named, "allowed"]:
        assert part in line


@pytest.mark.parametrize(("settings", "ranks"), ACCEPTED)
def test_accepted(settings: str, ranks: int) -> None:
    load(settings, ranks)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([["tok_embeddings", "layers.0"], ["layers.1", "layers.3", "norm", "output"]], "layers.2"),
        ([["tok_embeddings", "layers.0", "layers.2"], ["layers.1", "layers.3", *END]], "in order"),
        ([["tok_embeddings", *LAYERS, *END]], "makes 1 stages for 2 ranks"),
    ],
)
def test_every_module_has_its_stage(tmp_path: Path, parts: list[list[str]], named: str) -> None:
    def load_parts(names: list[list[str]]) -> None:
        recipe = tmp_path / "run.toml"
        recipe.write_text(f"[parallelism]\nmodule_fqns_per_model_part = {json.dumps(names)}\n")
        settings = f"--training.seq_len 64 --training.mixed_precision_param float32 {PP2}"
        load_config(["--job.config_file", str(recipe), *settings.split()], 2)

    load_parts([["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", *END]])
    with pytest.raises(ValueError, match=r"parallelism\.module_fqns_per_model_part") as refusal:
        load_parts(parts)
    assert named in str(refusal.value)
