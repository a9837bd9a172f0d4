"""Options that keep the numbers, or nearly, together with context parallelism and the others."""

from unittest import mock

import pytest

from recipes.models.decoder.model import Attention
from tests.helpers.launch import run_ranks
from tests.helpers.model_step import Step
from tests.helpers.training import COMPILE, CP, PP, TP, Job, Result, common, gradients, train

REPLICATE = "--parallelism.data_parallel_replicate_degree"
SHARD = "--parallelism.data_parallel_shard_degree"
CP2 = (CP, "2")
DDP2 = (REPLICATE, "2", SHARD, "1", "--training.local_batch_size", "2")
AC = "--activation_checkpoint.mode"
BFLOAT16 = ("--training.mixed_precision_param", "bfloat16")
FLOAT8 = (
    *("--model.converters", "quantize.linear.float8", "--quantize.linear.float8.emulate"),
    *("--quantize.linear.float8.filter_fqns", "output"),
)
ROWWISE = (*FLOAT8, "--quantize.linear.float8.recipe_name", "rowwise")
TENSORWISE = (*FLOAT8, "--quantize.linear.float8.recipe_name", "tensorwise")
slow = pytest.mark.slow
EXACT = {
    "full checkpoints": (2, (*CP2, AC, "full")),
    "every second block checkpointed": (
        2,
        (*CP2, AC, "selective", "--activation_checkpoint.selective_ac_option", "2"),
    ),
    "selective checkpoints": (2, (*CP2, AC, "selective")),
    "full checkpoints ddp2": (2, (*DDP2, AC, "full")),
    "CPU offload": (2, (*CP2, "--training.enable_cpu_offload")),
    "CPU offload cp2 tp2": (4, (*CP2, TP, "2", "--training.enable_cpu_offload")),
    "CPU offload cp2 pp2": (4, (*CP2, PP, "2", "--training.enable_cpu_offload")),
    "compiled": (2, (*CP2, *COMPILE)),
    "compiled, full checkpoints": (2, (*CP2, *COMPILE, AC, "full")),
    "compiled, selective checkpoints": (2, (*CP2, *COMPILE, AC, "selective")),
    "compiled tp2": (2, (TP, "2", *COMPILE)),
    "compiled pp2": (2, (PP, "2", *COMPILE)),
    "compiled ddp2": (2, (*DDP2, *COMPILE)),
    "compiled cp2 tp2": (4, (*CP2, TP, "2", *COMPILE)),
}
# name: (ranks, settings, greatest difference of the loss to float32 on one rank)
NEAR = {
    "bfloat16 on one rank": (1, BFLOAT16, 2e-3),
    "bfloat16 cp2": (2, (*CP2, *BFLOAT16), 2e-3),
    "bfloat16 cp2, full checkpoints": (2, (*CP2, *BFLOAT16, AC, "full"), 2e-3),
    "bfloat16 cp2 pp2": (4, (*CP2, PP, "2", *BFLOAT16), 2e-3),
    "bfloat16 cp2 tp2": (4, (*CP2, TP, "2", *BFLOAT16), 2e-3),
    "bfloat16 ddp2": (2, (*DDP2, *BFLOAT16), 2e-3),
    "float8 rowwise cp2": (2, (*CP2, *ROWWISE), 1e-2),
    "float8 tensorwise cp2": (2, (*CP2, *TENSORWISE), 1e-2),
    "float8 tensorwise cp2, gathered in float8": (
        2,
        (*CP2, *FLOAT8, "--quantize.linear.float8.enable_fsdp_float8_all_gather"),
        1e-2,
    ),
    "float8 rowwise tp2": (2, (TP, "2", *ROWWISE), 1e-2),
    "float8 tensorwise tp2": (2, (TP, "2", *TENSORWISE), 1e-2),
    "float8 rowwise ddp2": (2, (*DDP2, *ROWWISE), 1e-2),
    "float8 rowwise cp2 pp2": (4, (*CP2, PP, "2", *ROWWISE), 1e-2),
}
IN_DEFAULT_RUN = (
    *("full checkpoints", "selective checkpoints", "CPU offload", "compiled"),
    *("bfloat16 cp2", "float8 rowwise cp2"),
)


def cases(table: dict) -> list:
    return [
        pytest.param(name, marks=() if name in IN_DEFAULT_RUN else slow, id=name) for name in table
    ]


@pytest.mark.parametrize("name", cases(EXACT))
def test_same_numbers(name: str, seed_folder: str, one_rank: Result, tmp_path) -> None:
    ranks, settings = EXACT[name]
    job = Job(str(tmp_path), common(seed_folder) + settings, gradients(seed_folder))
    results = run_ranks(ranks, train, job, timeout=200)
    (shown,) = [result for result in results if result.scalars]
    for tag in ("loss_metrics/global_avg_loss", "validation_metrics/loss", "grad_norm"):
        assert shown.values(tag) == pytest.approx(one_rank.values(tag), rel=1e-4), tag
    for result in results:
        assert max(result.gradient_errors.values()) < 1e-5, result.gradient_errors
        assert result.recompiled == 0


@pytest.mark.parametrize("name", cases(NEAR))
def test_near_float32(name: str, seed_folder: str, one_rank: Result, tmp_path) -> None:
    ranks, settings, tolerance = NEAR[name]
    job = Job(str(tmp_path), common(seed_folder) + settings, gradients(seed_folder))
    results = run_ranks(ranks, train, job, timeout=200)
    (shown,) = [result for result in results if result.scalars]
    assert shown.losses == pytest.approx(one_rank.losses, rel=tolerance)
    assert shown.losses != one_rank.losses
    for result in results:
        # Rounding, not a missing or doubled part.
        assert 1e-5 < max(result.gradient_errors.values()) < 0.2, result.gradient_errors


def dtypes_in_attention() -> set[tuple[str, ...]]:
    """Of the hidden states, rotations and positions that the blocks' attention gets."""
    found = set()
    forward = Attention.forward

    def spy(self, x, rotation, documents, positions=None):
        found.add(tuple(str(tensor.dtype) for tensor in (x, rotation, positions)))
        return forward(self, x, rotation, documents, positions)

    with mock.patch.object(Attention, "forward", spy):
        Step(*CP2, *BFLOAT16, "--training.dtype", "bfloat16").run()
    return found


def test_bfloat16_rounds_no_positions() -> None:
    """FSDP casts what a block gets, and would cast angles that are floating-point numbers."""
    expected = {("torch.bfloat16", "torch.complex64", "torch.int64")}
    assert run_ranks(2, dtypes_in_attention) == [expected, expected]


@slow
def test_inductor_keeps_the_loss(seed_folder: str, one_rank: Result, tmp_path) -> None:
    settings = (*CP2, "--compile.enable", "--compile.components", "model,loss")
    job = Job(str(tmp_path), common(seed_folder) + settings, gradients(seed_folder))
    results = run_ranks(2, train, job, timeout=280)
    assert results[0].losses == pytest.approx(one_rank.losses, rel=1e-4)
    assert [result.recompiled for result in results] == [0, 0]


def train_twice(job: Job) -> list[Result]:
    return [train(job) for _ in range(2)]


def test_deterministic_runs_are_bitwise_equal(tmp_path) -> None:
    settings = (*CP2, "--debug.deterministic", "--validation.no-enable")
    first, second = run_ranks(2, train_twice, Job(str(tmp_path), settings), timeout=200)[0]
    assert first.losses == second.losses
    assert first.values("grad_norm") == second.values("grad_norm")
    assert len(set(first.losses)) == len(first.losses)


def test_validation_at_learning_rate_0_is_the_training_loss(tmp_path) -> None:
    for result in run_ranks(2, train, Job(str(tmp_path), (*CP2, "--optimizer.lr", "0"))):
        assert not result.changed
        if result.scalars:
            # Validation sees the batch of step 1.
            expected = pytest.approx([result.losses[0]] * 5, rel=1e-6)
            assert result.values("validation_metrics/loss") == expected
