"""When a run fails: one rank says why, last on the screen, and the job ends within seconds.

The rank whose error came first prints it; torchrun repeats it in its summary, below all else, by
way of the rank's error file. Ranks that fail because that one is gone have nothing to say. They
wait until torchrun stops them, so that it is not one of them that the summary calls the cause.
"""

import contextlib
import errno
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from recipes.titan import logger

_ROOT = Path(__file__).parents[2]
# How long a rank waits for torchrun to stop it, once another rank has failed.
_GRACE_SECONDS = 10
# What gloo and NCCL (torch 2.13) say when the other end of a connection is gone.
_LOST = re.compile(
    r"Connection (closed|reset|refused)|Broken pipe|Socket closed|ncclRemoteError|"
    r"remote process exited|NCCL communicator was aborted|failed to (send|recv)|"
    r"Read error|writev|Application timeout caused pair closure"
)
_TIMEOUT = re.compile(r"Timed out|timed out|timeout", re.IGNORECASE)
_ENVIRONMENT = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}

# Exit statuses after which the ranks are not to be started again: a wrong setting, and leaving on
# request.
FINAL = (2, 75)


class Stop(Exception):
    """Ends the run with its message alone: what is wrong is not in the code."""


def leave(error: BaseException, rank: int, debug: bool) -> NoReturn:
    """End the process after an error; does not return.

    Args:
        debug: whether a message alone is not enough.
    """
    # Imported late here and below: the first line of a process is not to wait for torch.
    from torch.distributed.checkpoint import CheckpointException

    if isinstance(error, CheckpointException):
        # All ranks get the failures of all; what happened is in the first.
        error = next(iter(error.failures.values()))[0]
    if _is_lost_peer(error):
        if _first("lost"):
            _say(f"rank {rank}: lost a neighbour, the rank that failed is named below")
        wait_for_launcher()
        end(f"lost another rank, see the other nodes: {_one_line(error)}", 1)
    if _is_timeout(error):
        waited = f"waited in vain in {_place(error)}: {_one_line(error)}"
        _say(f"rank {rank}: {waited}")
        # Every rank that waits says so: the one that says nothing is the one that hangs.
        silent = _silent_ranks(rank)
        who = f"rank {', '.join(map(str, silent))} is silent" if silent else "no rank is silent"
        record(f"{who}; rank {rank} {waited}")
        _end_silent(silent)
        _exit(1)
    if not _first("failed"):
        wait_for_launcher()
        _exit(1)
    message, status = explain(error)
    if debug or message is None:
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {_one_line(error)} (traceback above)"
    else:
        _say(f"rank {rank}: {message}")
    end(message, status)


@contextlib.contextmanager
def deadline(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Call `give_up` in a thread if the scope is not left in time: the rank itself may hang."""
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def waits_for_a_waiting_rank(rank: int, source: int) -> bool:
    """Whether the rank for which this one waits waits itself; then that one has more to say."""
    store = _default_store()
    store.set(f"striped_cp/waits/{rank}", "")
    time.sleep(1)
    return store.check([f"striped_cp/waits/{source}"])


def introduce(rank: int) -> None:
    """Let the ranks of this host know which process this one is."""
    _default_store().set(f"striped_cp/process/{rank}", f"{os.getpid()} {socket.gethostname()}")


def _silent_ranks(rank: int) -> list[int]:
    """Ranks that do not say within some seconds that they wait too; none if nobody can be asked."""
    try:
        store = _default_store()
        store.set(f"striped_cp/waits/{rank}", "")
        time.sleep(2)
        ranks = range(int(os.environ.get("WORLD_SIZE", 1)))
        return [r for r in ranks if not store.check([f"striped_cp/waits/{r}"])]
    except (RuntimeError, ValueError):
        return []


def _end_silent(ranks: list[int]) -> None:
    """Kill those of this host: a stopped process does not hear torchrun, which waits for it."""
    for rank in ranks:
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            pid, host = _default_store().get(f"striped_cp/process/{rank}").decode().split()
            if host == socket.gethostname():
                os.kill(int(pid), signal.SIGKILL)


def leave_now(message: str, rank: int) -> NoReturn:
    """End the process from another thread than the one that hangs."""
    _say(f"rank {rank}: {message}")
    end(message, 1)


def end(message: str, status: int) -> NoReturn:
    """End the process at once; torchrun's summary says why."""
    record(message)
    if status in FINAL:
        do_not_restart(status)
    _exit(status)


def do_not_restart(status: int) -> None:
    """Stop a torchrun that would start the ranks again (`--max-restarts`), in vain.

    Its own status is then 1; scripts/run_train.sh finds the true one in a file.
    """
    if "STRIPED_CP_STATUS_FILE" in os.environ:
        Path(os.environ["STRIPED_CP_STATUS_FILE"]).write_text(str(status))
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) < restarts:
        os.kill(os.getppid(), signal.SIGTERM)


def explain(error: BaseException) -> tuple[str | None, int]:
    """A message that says all, or None where a traceback is needed, and the exit status."""
    if isinstance(error, Stop):
        return str(error), 1
    if isinstance(error, ValueError) and _raised_here(error):
        return f"{_one_line(error)} (--debug shows where)", 2
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _ENVIRONMENT:
            where = f"{cause.filename}: " if cause.filename else ""
            return f"{where}{cause.strerror} (--debug shows where)", 1
        cause = cause.__cause__ or cause.__context__
    return None, 1


def _raised_here(error: BaseException) -> bool:
    """Whether this project raised it: torch's own ValueErrors are no message for a user."""
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or _is_ours(Path(frames[-1].filename))


def _place(error: BaseException) -> str:
    """The innermost line of this project that the error came through."""
    names = ((Path(f.filename), f) for f in traceback.extract_tb(error.__traceback__))
    ours = [f"{n.relative_to(_ROOT)}:{f.lineno}" for n, f in names if _is_ours(n)]
    return ours[-1] if ours else "torch"


def _is_ours(name: Path) -> bool:
    return name.is_relative_to(_ROOT / "recipes") or name.is_relative_to(_ROOT / "striped_cp")


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and _TIMEOUT.search(str(error)) is not None


def _first(what: str) -> bool:
    """Whether this is the first rank to say so, as far as the store can be asked."""
    try:
        return _default_store().add(f"striped_cp/{what}", 1) == 1
    except (RuntimeError, ValueError):
        return True  # there is no process group (any more)


def _default_store() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def wait_for_launcher() -> None:
    """Let torchrun stop this rank, without a failure of its own in the summary."""
    logger.handlers.clear()
    signal.signal(signal.SIGTERM, lambda *_: _exit(0))
    from recipes.process.signals import requested

    if requested():  # torchrun has stopped it already
        _exit(0)
    time.sleep(_GRACE_SECONDS)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def record(message: str) -> None:
    """Give torchrun what its summary is to say of this rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _exit(status: int) -> NoReturn:
    """Without Python's shutdown: threads and process groups of a broken job may never end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
