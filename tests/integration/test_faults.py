"""What a run does when it is asked to leave, when it breaks, and what it says."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from recipes.checkpoint.files import finished_steps
from tests.helpers.faults import Disturbed
from tests.helpers.runs import ROOT, TINY, torchrun


def endless(folder: Path, *settings: str) -> Disturbed:
    return Disturbed(
        2, *TINY, *("--training.steps", "100000", "--job.dump_folder", str(folder)), *settings
    )


ALONE = ("--parallelism.context_parallel_degree", "1")
SAVING = ("--checkpoint.enable", "--checkpoint.interval", "100000")


def test_one_signalled_rank_makes_all_save_and_leave(tmp_path: Path) -> None:
    run = endless(tmp_path, *SAVING)
    try:
        run.wait_for_steps(2)
        run.signal_rank(1, signal.SIGUSR1)
        run.wait(60)
    finally:
        run.stop()
    assert run.output.count("exitcode  : 75") == 2
    (step,) = finished_steps(tmp_path / "checkpoint")
    assert step == max(run.losses)
    assert f"asked to leave: step {step} is saved" in run.output


def test_ctrl_c_asks_to_leave(tmp_path: Path) -> None:
    run = endless(tmp_path, *SAVING)
    try:
        run.wait_for_steps(2)
        run.interrupt()
        assert run.wait(120) != 0
    finally:
        run.stop()
    (step,) = finished_steps(tmp_path / "checkpoint")
    assert run.output.count(f"asked to leave: step {step} is saved") == 1
    # torchrun's own, and none of a rank.
    assert "KeyboardInterrupt" not in run.output


def test_a_folder_has_one_run_and_a_run_its_launcher(tmp_path: Path) -> None:
    """A second run is refused while there is a first, whose ranks end with their launcher."""
    run = endless(tmp_path, *SAVING)
    try:
        run.wait_for_steps(1)
        second = torchrun(1, *TINY, *ALONE, "--job.dump_folder", str(tmp_path), *SAVING)
        assert second.status != 0
        (line,) = [line for line in second.output.splitlines() if line.startswith("job.dump_fold")]
        assert "a live run writes its checkpoints there" in line
        ranks = [run.rank_pid(rank) for rank in range(2)]
        run.process.kill()
        deadline = time.monotonic() + 120
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            assert time.monotonic() < deadline, run.output
            time.sleep(0.1)
    finally:
        run.stop()
    (step,) = finished_steps(tmp_path / "checkpoint")
    again = ("--training.steps", str(step), "--job.dump_folder", str(tmp_path))
    assert torchrun(2, *TINY, *again, *SAVING).status == 0


def test_a_killed_rank_is_named_once_and_last(tmp_path: Path) -> None:
    run = endless(tmp_path)
    try:
        run.wait_for_steps(2)
        run.signal_rank(0, signal.SIGKILL)
        start = time.monotonic()
        assert run.wait(60) != 0
    finally:
        run.stop()
    assert time.monotonic() - start < 20
    summary = run.output[run.output.rindex("Root Cause") :]
    assert "rank      : 0" in summary
    assert "Signal 9 (SIGKILL)" in summary
    assert "<NO_OTHER_FAILURES>" in run.output
    # torchrun's own traceback, and none of a rank.
    assert run.output.count("Traceback") == 1


@pytest.mark.slow
def test_a_hanging_rank_ends_the_run_with_the_timeout(tmp_path: Path) -> None:
    run = endless(tmp_path, "--comm.train_timeout_seconds", "5")
    try:
        run.wait_for_steps(3)
        run.signal_rank(1, signal.SIGSTOP)
        assert run.wait(100) != 0
    finally:
        run.stop()
    summary = run.output[run.output.rindex("Root Cause") :]
    assert "rank      : 0" in summary
    assert "rank 1 is silent; rank 0 waited in vain in " in summary


def test_gradients_that_are_no_numbers_stop_the_run(tmp_path: Path) -> None:
    run = torchrun(
        2,
        *TINY,
        *("--optimizer.lr", "1e38", "--lr_scheduler.warmup_steps", "0"),
        *("--job.dump_folder", str(tmp_path), "--training.steps", "20"),
        *("--checkpoint.enable", "--checkpoint.interval", "1"),
    )
    assert run.status != 0
    (line,) = [line for line in run.output.splitlines() if line.startswith("rank ")]
    step = int(line.split("step ")[1].split(":")[0])
    assert "loss or gradients are not finite" in line
    good = max(finished_steps(tmp_path / "checkpoint"), default=None)
    assert f"last good checkpoint: {tmp_path / 'checkpoint'}/step-{good}" in line
    assert good == step - 1
    assert run.output.count("Traceback") == 1


def rank_of(folder: Path) -> int:
    """A rank of the run that writes to `folder`."""
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            command = (environment.parent / "cmdline").read_text()
            if str(folder) in command and b"\0LOCAL_RANK=" in environment.read_bytes():
                return int(environment.parent.name)
    raise AssertionError("no rank")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launcher", "rank"])
def test_run_train_passes_on_why(tmp_path: Path, how: str) -> None:
    command = ["scripts/run_train.sh", "train_configs/debug_cpu.toml", *TINY, *SAVING]
    command += ["--job.dump_folder", str(tmp_path), "--training.steps", "100000"]
    environment = {**os.environ, "NPROC": "2", "MAX_RESTARTS": "2"}
    log = tmp_path / "log"
    with log.open("w") as output:
        run = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + 120
        while "loss:" not in log.read_text():
            assert run.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        if how == "launcher":
            run.send_signal(signal.SIGTERM)
        else:
            # The ranks end, and torchrun does not start them again.
            os.kill(rank_of(tmp_path), signal.SIGUSR1)
        assert run.wait(120) == 75, log.read_text()
    assert len(finished_steps(tmp_path / "checkpoint")) == 1
    wrong = subprocess.run(
        [*command, "--training.seq_len", "131"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert wrong.returncode == 2
    # Once by rank 0, once in torchrun's report.
    assert wrong.stderr.count("training.seq_len = 131") <= 2
