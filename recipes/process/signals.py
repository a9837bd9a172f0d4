"""Leaving on request: SIGTERM, SIGUSR1 or Ctrl-C saves at the end of the step and exits.

A scheduler that wants its machines back signals first and kills later. The signal may reach one
rank or all of them, at any time; all ranks leave together after the same step.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EXIT_STATUS = os.EX_TEMPFAIL  # 75: the same command, started again, goes on
# SIGTERM: Kubernetes, SLURM's preemption, torchrun. SIGUSR1: `sbatch --signal=USR1@600`.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
# One Ctrl-C reaches a rank twice, from the terminal and from torchrun; one after that many seconds
# is another one.
_SAME_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1  # Linux, sys/prctl.h

_requested = False
_interrupted = math.inf


class Preempted(BaseException):
    """Ends the process with EXIT_STATUS; nothing went wrong, so it is no Exception."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def listen() -> None:
    """Take note of the signals from now on, instead of dying of them.

    A launcher that is killed asks its ranks to leave with its last breath: they would train on
    without it.
    """
    for number in SIGNALS:
        signal.signal(number, _note)
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _note(number: int, frame: object) -> None:
    global _requested, _interrupted
    _requested = True
    if number == signal.SIGINT:
        if time.monotonic() > _interrupted + _SAME_SECONDS:
            os._exit(128 + number)
        _interrupted = min(_interrupted, time.monotonic())


def requested() -> bool:
    """Whether this rank was asked to leave."""
    return _requested


def agreed(device: torch.device) -> bool:
    """Whether any rank was asked to leave: a collective of all ranks, of one number."""
    import torch

    flag = torch.tensor(float(_requested), device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
