"""A sign of life from steps that take minutes, as those of a million tokens do."""

import contextlib
import threading
import time
from collections.abc import Iterator

from recipes.titan import logger


@contextlib.contextmanager
def signs_of_life(step: int, expected_seconds: float | None, every: float = 60.0) -> Iterator[None]:
    """Log how far a step is while it runs.

    Args:
        expected_seconds: how long the step should take; None where nobody knows, in the first one.
        every: seconds between two lines.
    """
    done = threading.Event()
    began = time.perf_counter()

    def watch() -> None:
        while not done.wait(every):
            seconds = time.perf_counter() - began
            if expected_seconds is None:
                logger.info(
                    f"step {step}: {seconds:.0f} s so far; the first one also compiles kernels "
                    "and allocates memory"
                )
            else:
                logger.info(f"step {step}: {seconds:.0f} s of about {expected_seconds:.0f} s")

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
