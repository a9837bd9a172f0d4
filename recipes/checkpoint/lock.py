"""One run at a time writes the checkpoints of a folder."""

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting
from recipes.titan import logger

FILE = "run.lock"
# Open as long as the process lives: the system lets go of the lock with it, however it ends.
_held: list[IO[str]] = []


def hold_folder(config: StripedJobConfig) -> None:
    """Keep other runs out of this run's dump folder from now on; called by rank 0.

    Raises:
        InvalidSetting: a live run writes checkpoints there.
    """
    folder = Path(config.job.dump_folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        file = open(folder / FILE, "a+")  # noqa: SIM115
    except OSError as error:
        raise ValueError(f"{folder / FILE}: {error.strerror}; move it elsewhere") from None
    try:
        # On a shared file system, too (NFS version 4).
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning(f"{folder}: cannot be locked against other runs ({error.strerror})")
            return
        file.seek(0)
        who = file.read().strip() or "another run"
        why = f"a live run writes its checkpoints there: {who}"
        allowed = "another folder, or this one when that run has ended"
        raise InvalidSetting("job.dump_folder", str(folder), why, allowed) from None
    _held.append(file)
    file.truncate(0)
    started = time.strftime("%Y-%m-%d %H:%M:%S")
    file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": started}))
    file.flush()
