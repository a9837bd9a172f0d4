"""What the memory levers cannot go together with is refused, naming both settings."""

import pytest

from recipes.memory import offload
from recipes.preflight import load_config
from recipes.preflight.levers import check_host_memory, offloaded_bytes_per_rank

CONFIG = ["--job.config_file", "train_configs/debug_cpu.toml"]
OP = [
    "--activation_checkpoint.mode",
    "selective",
    "--activation_checkpoint.selective_ac_option",
    "op",
]
EVERY_OTHER = ["--activation_checkpoint.mode", "selective"]
FULL = ["--activation_checkpoint.mode", "full"]
COMPILED = ["--compile.enable"]
OFFLOAD = ["--memory.offload_checkpoints"]
FLOAT8 = ["--model.converters", "quantize.linear.float8"]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (OFFLOAD, ["memory.offload_checkpoints = true", 'activation_checkpoint.mode = "none"']),
        ([*OFFLOAD, *OP], ["memory.offload_checkpoints = true", 'selective_ac_option = "op"']),
        ([*OFFLOAD, *FULL, *COMPILED], ["offload_checkpoints = true", "compile.enable = false"]),
        (["--memory.recompute_attention"], ["memory.recompute_attention = true", '"none"']),
        (["--memory.mlp_chunk_tokens", "8", *OP], ["memory.mlp_chunk_tokens = 8", '"op"']),
        (
            [*FULL, "--activation_checkpoint.debug"],
            ["activation_checkpoint.debug = true", "memory.recompute_attention = true"],
        ),
        (
            [*FLOAT8, "--quantize.linear.float8.filter_fqns", "wq"],
            ["memory.loss_chunk_tokens = 2048", 'filter_fqns = ["output"]'],
        ),
        (
            [
                *("--parallelism.disable_loss_parallel", "--memory.loss_chunk_tokens", "2048"),
                *("--parallelism.tensor_parallel_degree", "2"),
            ],
            ["memory.loss_chunk_tokens = 2048", "parallelism.disable_loss_parallel"],
        ),
        (["--memory.loss_chunk_tokens", "-1"], ["memory.loss_chunk_tokens = -1", "at least 0"]),
    ],
)
def test_refused(overrides, names):
    with pytest.raises(ValueError, match=r"debug_cpu\.toml|command line") as error:
        load_config([*CONFIG, *overrides])
    for name in names:
        assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        [*OFFLOAD, *FULL],
        [*OFFLOAD, *EVERY_OTHER, "--memory.recompute_attention"],
        [*FULL, *COMPILED, "--memory.mlp_chunk_tokens", "8"],
        [*FLOAT8, "--quantize.linear.float8.filter_fqns", "output"],
        [*FLOAT8, "--memory.loss_chunk_tokens", "0"],
    ],
)
def test_accepted(overrides):
    load_config([*CONFIG, *overrides])


def test_host_without_room_is_refused_at_startup(monkeypatch):
    """8B at 1M on 8 ranks of one host: 32 layers x 2 tensors of 1 GiB x 8 ranks = 512 GiB."""
    config = load_config(["--job.config_file", "train_configs/llama3_8b_1m.toml"])
    assert offloaded_bytes_per_rank(config) == 64 * 2**30
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(offload, "host_memory_available", lambda: 300 * 2**30)
    with pytest.raises(
        ValueError, match=r"offload_checkpoints = true: .* 512\.. GiB .* 300\.0 GiB"
    ):
        check_host_memory(config)
    monkeypatch.setattr(offload, "host_memory_available", lambda: 1000 * 2**30)
    check_host_memory(config)


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    [("1F1B", 4), ("Interleaved1F1B", 5.5), ("LoopedBFS", 16), ("GPipe", 16)],
)
def test_host_memory_of_a_pipeline_is_that_of_the_microbatches_under_way(schedule, microbatches):
    """70B on pp 4: 20 layers a rank, block input and attention output of 32 MiB each."""
    settings = {
        **{"model.flavor": "70B", "training.seq_len": 131072, "training.local_batch_size": 16},
        **{"parallelism.context_parallel_degree": 8, "parallelism.tensor_parallel_degree": 8},
        **{"parallelism.pipeline_parallel_degree": 4},
        "parallelism.pipeline_parallel_schedule": schedule,
        "activation_checkpoint.mode": "full",
    }
    overrides = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    config = load_config([*overrides, *OFFLOAD])
    assert offloaded_bytes_per_rank(config) == microbatches * 20 * 2 * 32 * 2**20


def test_host_without_room_is_an_error_at_run_time(monkeypatch):
    import torch

    def full(*args, **kwargs):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(
        RuntimeError, match=r"offload_checkpoints: the host has no room for 0\.50 GiB"
    ):
        offload._empty_on_host(torch.empty(2**29, dtype=torch.int8, device="meta"))


def test_available_host_memory_is_read():
    assert 2**20 < offload.host_memory_available() < 2**50
