"""One seed checkpoint, one curve: whatever the degrees, the numbers are those of one process."""

from pathlib import Path

import pytest

from tests.helpers.runs import Run, train
from tests.integration.conftest import STEPS

LOSS, LARGEST = "loss_metrics/global_avg_loss", "loss_metrics/global_max_loss"
VALIDATION = "validation_metrics/loss"


def assert_same_curve(run: Run, reference: Run) -> None:
    for step in range(1, STEPS + 1):
        assert run.scalars[LOSS][step] == pytest.approx(reference.scalars[LOSS][step], rel=1e-4)
        expected = reference.scalars["grad_norm"][step]
        assert run.scalars["grad_norm"][step] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("degree", [2, 4])
def test_losses_and_gradient_norms_do_not_depend_on_the_degree(
    by_degree: dict[int, Run], degree: int
) -> None:
    assert_same_curve(by_degree[degree], by_degree[1])


def test_the_run_learns(by_degree: dict[int, Run]) -> None:
    losses = by_degree[2].scalars[LOSS]
    assert losses[1] > 7.0
    assert losses[STEPS] < losses[1] - 1.0


@pytest.mark.parametrize("degree", [2, 4])
def test_validation_loss_does_not_depend_on_the_degree(
    by_degree: dict[int, Run], degree: int
) -> None:
    validation, reference = (by_degree[d].scalars[VALIDATION] for d in (degree, 1))
    assert sorted(reference) == [1, 5, 10]
    for step in reference:
        assert validation[step] == pytest.approx(reference[step], rel=1e-4)


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_tokens_and_largest_loss_are_true(by_degree: dict[int, Run], degree: int) -> None:
    scalars = by_degree[degree].scalars
    for step in range(1, STEPS + 1):
        assert scalars["n_tokens_seen"][step] == step * 2 * 132
        assert scalars[LARGEST][step] >= scalars[LOSS][step] - 1e-4


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_one_event_file_with_every_metric(by_degree: dict[int, Run], degree: int) -> None:
    run = by_degree[degree]
    assert len(run.event_files) == 1
    for tag in (LOSS, LARGEST, "grad_norm", "throughput(tps)", "mfu(%)"):
        assert sorted(run.scalars[tag]) == list(range(1, STEPS + 1)), tag
    memory, share = (run.scalars[f"memory/max_reserved({unit})"][STEPS] for unit in ("GiB", "%"))
    assert 0.1 < memory < 4
    assert 0 < share < 100
    assert 0 < run.scalars["mfu(%)"][STEPS] < 100


def test_only_one_rank_speaks_and_nobody_warns(by_degree: dict[int, Run]) -> None:
    output = by_degree[2].output
    assert output.count("step:  1 ") == 2  # one line of training, one of validation
    assert "warn" not in output.lower()
    assert "lspci" not in output


# Parallelisms, as [parallelism] spells them, next to the degree of context parallelism.
TENSOR = ("--parallelism.tensor_parallel_degree", "2")
PIPELINE = ("--parallelism.pipeline_parallel_degree", "2")
REPLICATE = ("--parallelism.data_parallel_replicate_degree", "2")
NO_SHARDS = ("--parallelism.data_parallel_shard_degree", "1")
COMPILE = ("--compile.enable", "--compile.components", "model")


def context(degree: int) -> tuple[str, ...]:
    return ("--parallelism.context_parallel_degree", str(degree))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(4, (*context(2), *TENSOR)), (4, (*context(2), *PIPELINE)), (2, (*context(2), *COMPILE))],
    ids=["tensor", "pipeline", "compile"],
)
def test_other_parallelisms_keep_the_curve(
    common: tuple[str, ...],
    by_degree: dict[int, Run],
    tmp_path: Path,
    ranks: int,
    settings: tuple[str, ...],
) -> None:
    run = train(ranks, tmp_path, *common, *settings)
    assert_same_curve(run, by_degree[1])
    assert len(run.event_files) == 1
    assert run.scalars["n_tokens_seen"][STEPS] == STEPS * 2 * 132


@pytest.mark.slow
def test_data_parallelisms_share_one_curve(common: tuple[str, ...], tmp_path: Path) -> None:
    """Two ranks read other data than one does, but the same whichever way they share the model."""
    half = (*common, "--training.local_batch_size", "1")
    sharded = train(2, tmp_path / "sharded", *half, *context(1))
    for name, ranks, settings in (
        ("replicated", 2, (*context(1), *REPLICATE, *NO_SHARDS)),
        ("sharded, ring", 4, context(2)),
        ("replicated, ring", 4, (*context(2), *REPLICATE)),
    ):
        run = train(ranks, tmp_path / name, *half, *settings)
        assert_same_curve(run, sharded)
        assert run.scalars["n_tokens_seen"][STEPS] == STEPS * 2 * 132
