"""One seed checkpoint, one curve: whatever the degrees, the numbers are those of one process."""

from pathlib import Path

import pytest

from tests.integration.conftest import STEPS
from tests.integration.runs import Run, train

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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (2, {"context": 1, "data_shard": 2}),
        (2, {"context": 1, "data_replicate": 2, "data_shard": 1}),
        (4, {"context": 2, "data_shard": 2}),
        (4, {"context": 2, "data_replicate": 2, "data_shard": 1}),
        (4, {"context": 2, "tensor": 2}),
        (4, {"context": 2, "pipeline": 2}),
    ],
)
def test_other_degrees_keep_the_curve(
    common: tuple[str, ...],
    by_degree: dict[int, Run],
    tmp_path: Path,
    ranks: int,
    settings: dict[str, int],
) -> None:
    # The two sequences of a step go to the data-parallel ranks in another order than to one rank,
    # so that only a run whose ranks read the same data is comparable step by step.
    degrees = [
        argument
        for name, degree in settings.items()
        for argument in (f"--parallelism.{_key(name)}", str(degree))
    ]
    data_parallel = settings.get("data_shard", 1) * settings.get("data_replicate", 1)
    batch = ("--training.local_batch_size", str(2 // data_parallel))
    run = train(ranks, tmp_path, *common, *degrees, *batch)
    assert len(run.event_files) == 1
    assert run.scalars["n_tokens_seen"][STEPS] == STEPS * 2 * 132
    if data_parallel == 1:
        assert_same_curve(run, by_degree[1])


def _key(name: str) -> str:
    prefix, _, suffix = name.partition("_")
    return f"{prefix}_parallel_{suffix}_degree" if suffix else f"{prefix}_parallel_degree"
