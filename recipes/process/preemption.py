"""Leaving on request: SIGTERM or SIGUSR1 saves a checkpoint at the end of the step and exits.

A scheduler that wants its machines back signals first and kills later. The signal may reach one
rank or all of them, at any time; all ranks leave together after the same step.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

EXIT_STATUS = os.EX_TEMPFAIL  # 75: the same command, started again, goes on
# SIGTERM: Kubernetes, SLURM's preemption, torchrun. SIGUSR1: `sbatch --signal=USR1@600`.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

_requested = False


class Preempted(BaseException):
    """Ends the process with EXIT_STATUS; nothing went wrong, so it is no Exception."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def listen() -> None:
    """Take note of the signals from now on, instead of dying of them."""
    for number in SIGNALS:
        signal.signal(number, _note)


def _note(number: int, frame: object) -> None:
    global _requested
    _requested = True


def requested() -> bool:
    """Whether this rank was asked to leave."""
    return _requested


def agreed(device: torch.device) -> bool:
    """Whether any rank was asked to leave: a collective of all ranks, of one number."""
    import torch

    flag = torch.tensor(float(_requested), device=device)
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
    return bool(flag.item())
