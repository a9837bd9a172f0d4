"""Ranks are killed, at random and while they save: the run goes on to the same end."""

import contextlib
import random
import signal
import time
from pathlib import Path

import pytest

from recipes.checkpoint.files import METADATA, finished_steps, read_whole
from tests.helpers.faults import Disturbed
from tests.helpers.runs import TINY

# Forward passes without a backward pass, before and after saves.
MEASURED = (
    *("--validation.enable", "--validation.freq", "2", "--validation.steps", "1"),
    *("--evaluation.enable", "--evaluation.freq", "3", "--evaluation.lengths", "132"),
    *("--evaluation.tasks", "passkey", "--evaluation.samples", "1", "--evaluation.depths", "0.5"),
    *("--evaluation.texts", "0"),
)


def start(ranks: int, folder: Path, steps: int, restarts: int) -> Disturbed:
    """A run that saves every other step, and that torchrun starts again so many times."""
    return Disturbed(
        ranks,
        *(*TINY, *MEASURED),
        *("--job.dump_folder", str(folder), "--parallelism.context_parallel_degree", str(ranks)),
        *("--striped_cp.ulysses_degree", str(ranks // 2)),  # two ranks a ring, four 2 x 2
        *("--training.steps", str(steps), "--checkpoint.enable", "--checkpoint.interval", "2"),
        torchrun=("--standalone", "--max-restarts", str(restarts)),
    )


def kill(run: Disturbed, rank: int) -> None:
    """Kill a rank, and wait until torchrun has started another one in its place."""
    killed = run.rank_pid(rank)
    run.signal_rank(rank, signal.SIGKILL)
    run.wait_for(lambda: run.rank_pid(rank) not in (killed, None), "a restart")


def unfinished_files(checkpoints: Path) -> set[tuple[Path, int]]:
    """Data that is not marked as finished, each file with its last change."""
    found = set()
    for file in checkpoints.glob("step-*/*.distcp"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            if not (file.parent / METADATA).exists():
                found.add((file, file.stat().st_mtime_ns))
    return found


def ask_to_leave(run: Disturbed, rank: int) -> None:
    run.signal_rank(rank, signal.SIGUSR1)
    assert run.wait(400) != 0
    assert "asked to leave: step" in run.output or "before the first step" in run.output


def check_disturbed(ranks: int, disturbances: int, seed: int, folder: Path) -> None:
    """A run with kills in saves, kills at any moment, and requests to leave, in turn."""
    steps = 6 + 2 * disturbances
    whole = start(ranks, folder / "whole", steps, 0)
    assert whole.wait(900) == 0, whole.output
    dice = random.Random(seed)
    checkpoints = folder / "parts" / "checkpoint"
    unfinished = 0
    losses: dict[int, float] = {}
    run = start(ranks, folder / "parts", steps, disturbances)
    try:
        for number in range(disturbances):
            if number % 3 == 0:
                # What a killed save has left does not change any more.
                left = unfinished_files(checkpoints)
                run.wait_for(lambda left=left: unfinished_files(checkpoints) - left, "a save")
                time.sleep(dice.uniform(0, 0.05))
            else:
                run.wait_for_steps(1)
                time.sleep(dice.uniform(0, 0.5))
            rank = dice.randrange(ranks)
            if number % 3 == 2:
                ask_to_leave(run, rank)
                losses |= run.losses
                run = start(ranks, folder / "parts", steps, disturbances)
            else:
                kill(run, rank)
            finished = finished_steps(checkpoints)
            unfinished += len(finished) < len(list(checkpoints.glob("step-*")))
            for step in finished:
                read_whole(checkpoints / f"step-{step}")
        assert run.wait(900) == 0, run.output
    finally:
        run.stop()
    assert unfinished > 0
    losses |= run.losses
    assert sorted(losses) == sorted(whole.losses) == list(range(1, steps + 1))
    assert losses == pytest.approx(whole.losses, abs=1e-5)
    assert steps in finished_steps(checkpoints)
    read_whole(checkpoints / f"step-{steps}")


@pytest.mark.timeout(1800)
def test_two_kills_and_a_request(tmp_path: Path) -> None:
    check_disturbed(2, 3, seed=1, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(6000)
@pytest.mark.parametrize(("ranks", "seed"), [(2, 2), (4, 3)])
def test_fifteen_kills_and_requests(ranks: int, seed: int, tmp_path: Path) -> None:
    check_disturbed(ranks, 15, seed, tmp_path)
