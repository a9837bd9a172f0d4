"""torchtitan 0.2.2 names the folder of a run's TensorBoard files by the minute of its start."""

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest import mock


@contextlib.contextmanager
def own_folder(parent: Path) -> Iterator[None]:
    """While torchtitan's logger is made: a folder in `parent` that no other run has.

    TensorBoard would draw two runs of one minute as one.
    """

    def strftime(_: str) -> str:
        name = start = datetime.now().strftime("%Y%m%d-%H%M%S")
        number = 1
        while (parent / name).exists():
            number += 1
            name = f"{start}-{number}"
        return name

    now = SimpleNamespace(now=lambda: SimpleNamespace(strftime=strftime))
    with mock.patch("torchtitan.components.metrics.datetime", now):
        yield
