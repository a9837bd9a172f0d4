"""train.py, on which a scheduler's signal arrives during step LEAVE_STEP, on rank LEAVE_RANK."""

import os
import signal
import sys

from recipes.launch import main
from recipes.process import signals
from recipes.train.trainer import StripedTrainer

_train_step = StripedTrainer.train_step


def signalled(self: StripedTrainer, *args: object) -> None:
    if (
        self.step == int(os.environ["LEAVE_STEP"])
        and os.environ["RANK"] == os.environ["LEAVE_RANK"]
    ):
        os.kill(os.getpid(), signal.SIGUSR1)
    _train_step(self, *args)


if __name__ == "__main__":
    StripedTrainer.train_step = signalled  # type: ignore[method-assign]
    signals.listen()
    main(sys.argv[1:])
