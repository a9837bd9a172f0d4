"""Runs that are disturbed: signals to single ranks at chosen moments."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.runs import RECIPE, ROOT

# Of training: a line of validation looks alike.
_STEP = re.compile(r"(?<!validate )step: +(\d+) +loss: +(\S+)")


class Disturbed:
    """`torchrun ... train.py`, running.

    Attributes:
        lines: what it has printed, without colours.
        losses: of every step that was logged, the last one of a repeated step.
    """

    def __init__(
        self,
        ranks: int,
        *settings: str,
        torchrun: tuple[str, ...] = ("--standalone",),
        wrapper: tuple[str, ...] = (),
        script: str = "train.py",
        **environment: str,
    ) -> None:
        launcher = (sys.executable, "-m", "torch.distributed.run")
        if script != "train.py":  # which finds the checkout itself
            environment["PYTHONPATH"] = str(ROOT)
        training = (script, "--job.config_file", RECIPE)
        self.process = subprocess.Popen(
            [*wrapper, *launcher, *torchrun, "--nproc_per_node", str(ranks), *training, *settings],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.losses: dict[int, float] = {}
        self.steps = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            line = re.sub(r"\x1b\[[0-9;]*m", "", line.rstrip("\n"))
            self.lines.append(line)
            if match := _STEP.search(line):
                self.losses[int(match[1])] = float(match[2])
                self.steps += 1

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def rank_pid(self, rank: int) -> int | None:
        """Process of a rank, once it has started."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            for pid in children.read_text().split():
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in environment:
                    return int(pid)
        except OSError:
            pass  # a process that has ended meanwhile
        return None

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        pid = self.rank_pid(rank)
        assert pid is not None, self.output
        os.kill(pid, number)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal signals the launcher and its ranks."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_for(self, happened: Callable[[], bool], what: str, timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not happened():
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {what} in {timeout} s:\n{self.output}"
            time.sleep(0.005)

    def wait_for_steps(self, number: int) -> None:
        """Wait until so many more steps were logged."""
        goal = self.steps + number
        self.wait_for(lambda: self.steps >= goal, f"{number} more steps")

    def wait(self, timeout: float = 120) -> int:
        """Exit status."""
        try:
            status = self.process.wait(timeout)
        finally:
            self.stop()
        self._reader.join(10)
        return status

    def stop(self) -> None:
        """End whatever is left of it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
