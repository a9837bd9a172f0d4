"""Runs of the command line, and what they left behind."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import ROOT

RECIPE = "train_configs/debug_cpu.toml"
# A tiny run: a step takes a few hundredths of a second.
TINY = (
    *("--training.seq_len", "132", "--training.local_batch_size", "2"),
    *("--lr_scheduler.warmup_steps", "2", "--metrics.log_freq", "1", "--debug.seed", "7"),
)


@dataclass
class Run:
    """A finished run: its exit status, everything it printed, and its TensorBoard scalars.

    `scalars[tag][step]` is a value; `event_files` are all files that TensorBoard would read.
    """

    status: int
    output: str
    event_files: list[Path] = field(default_factory=list)
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)


def torchrun(ranks: int, *settings: str, recipe: str = RECIPE, timeout: float = 200) -> Run:
    """`torchrun --nproc_per_node RANKS train.py --job.config_file RECIPE SETTINGS`."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc_per_node", str(ranks), "train.py", "--job.config_file", recipe, *settings),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        timeout=timeout,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return Run(finished.returncode, re.sub(r"\x1b\[[0-9;]*m", "", finished.stdout))


def train(ranks: int, folder: Path, *settings: str, timeout: float = 200) -> Run:
    """A run that must succeed, with its TensorBoard files under `folder`."""
    run = torchrun(ranks, "--job.dump_folder", str(folder), *settings, timeout=timeout)
    assert run.status == 0, run.output
    run.event_files = sorted(folder.rglob("events.out.tfevents.*"))
    for file in run.event_files:
        events = EventAccumulator(str(file)).Reload()
        for tag in events.Tags()["scalars"]:
            run.scalars[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return run
