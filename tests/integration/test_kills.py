"""Ranks are killed, at random and while they save: the run goes on to the same end."""

import random
import signal
import time
from pathlib import Path

import pytest

from recipes.checkpoint.files import METADATA, finished_steps, read_whole
from tests.helpers.faults import Disturbed
from tests.helpers.runs import TINY


def start(ranks: int, folder: Path, steps: int, restarts: int) -> Disturbed:
    """A run that saves every other step, and that torchrun starts again so many times."""
    return Disturbed(
        ranks,
        *TINY,
        *("--job.dump_folder", str(folder), "--parallelism.context_parallel_degree", str(ranks)),
        *("--training.steps", str(steps), "--checkpoint.enable", "--checkpoint.interval", "2"),
        torchrun=("--standalone", "--max-restarts", str(restarts)),
    )


def kill(run: Disturbed, rank: int) -> None:
    """Kill a rank, and wait until torchrun has started another one in its place."""
    killed = run.rank_pid(rank)
    run.signal_rank(rank, signal.SIGKILL)
    run.wait_for(lambda: run.rank_pid(rank) not in (killed, None), "a restart")


def is_saving(checkpoints: Path) -> bool:
    """Whether data is being written that is not marked as finished."""
    return any(
        not (file.parent / METADATA).exists() and time.time() - file.stat().st_mtime < 0.3
        for file in checkpoints.glob("step-*/*.distcp")
    )


def kill_ranks(run: Disturbed, ranks: int, kills: int, seed: int, checkpoints: Path) -> int:
    """Kill ranks at random; returns how many kills left an unfinished checkpoint behind.

    Every other kill hits a save: between a checkpoint's data and its mark as finished.
    """
    dice = random.Random(seed)
    unfinished = 0
    for number in range(kills):
        if number % 2 == 0:
            run.wait_for(lambda: is_saving(checkpoints), "a save")
            time.sleep(dice.uniform(0, 0.05))
        else:
            run.wait_for_steps(1)
            time.sleep(dice.uniform(0, 0.5))
        kill(run, dice.randrange(ranks))
        finished = finished_steps(checkpoints)
        unfinished += len(finished) < len(list(checkpoints.glob("step-*")))
        for step in finished:
            read_whole(checkpoints / f"step-{step}")
    return unfinished


def check_kills(ranks: int, kills: int, seed: int, folder: Path) -> None:
    steps = 6 + 2 * kills
    whole = start(ranks, folder / "whole", steps, 0)
    assert whole.wait(400) == 0, whole.output
    run = start(ranks, folder / "killed", steps, kills)
    checkpoints = folder / "killed" / "checkpoint"
    try:
        assert kill_ranks(run, ranks, kills, seed, checkpoints) > 0
        assert run.wait(400) == 0, run.output
    finally:
        run.stop()
    assert sorted(run.losses) == sorted(whole.losses) == list(range(1, steps + 1))
    for step, loss in run.losses.items():
        assert loss == pytest.approx(whole.losses[step], abs=1e-5), step
    assert steps in finished_steps(checkpoints)
    read_whole(checkpoints / f"step-{steps}")


@pytest.mark.timeout(900)
def test_two_kills(tmp_path: Path) -> None:
    check_kills(2, 2, seed=1, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("ranks", "seed"), [(2, 2), (4, 3)])
def test_ten_kills(ranks: int, seed: int, tmp_path: Path) -> None:
    check_kills(ranks, 10, seed, tmp_path)
