"""torchtitan's checkpointer (0.2.2) where it would lose work: names, branches, preemption."""

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import MODEL, CheckpointManager

from recipes.checkpoint.files import (
    BRANCH,
    branch_goes_on,
    exported_steps,
    finished_steps,
    load_error,
    step_folders,
)
from recipes.process.signals import Preempted
from recipes.titan import device_module, logger
from recipes.titan.patches import safetensors_format_named


class StripedCheckpoints(CheckpointManager):
    """Saves in any state of the model, and takes only whole folders `step-N` for checkpoints."""

    def load(self, step: int = -1) -> bool:
        """Load what the run goes on or starts from.

        Args:
            step: checkpoint.load_step; -1: the latest.
        """
        if self.enable and not self.load_only:
            chosen = [step]
            if dist.get_rank() == 0:
                self._forget_unfinished_start()
                chosen = [self._begin_branch(step)]
            dist.broadcast_object_list(chosen)
            (step,) = chosen
        return super().load(step)

    def _forget_unfinished_start(self) -> None:
        """Put away what a run left that died in its first save.

        torchtitan takes any checkpoint folder for a run under way: it would start from random
        weights instead of checkpoint.initial_load_path or Hugging Face's. Weights in it may be an
        export that another program wrote whole: they are kept beside it.
        """
        folder = Path(self.folder)
        if not folder.is_dir() or self._find_load_step() != -1:
            return
        if any(folder.glob("step-*/**/*.safetensors")):
            aside = _next_number(folder.parent, f"{folder.name}-unfinished-")
            folder.rename(aside)
            logger.warning(f"{folder}: holds no whole checkpoint or export, it is {aside} now")
            return
        for path in step_folders(folder).values():
            shutil.rmtree(path)
        if not any(folder.iterdir()):
            folder.rmdir()

    def _begin_branch(self, step: int) -> int:
        """Make the folder that of one line of training, which starts at `step`; the step to load.

        Later steps of another line are set aside: they would be taken for this one's, and
        checkpoint.keep_latest_k would keep them in place of this one's.
        """
        folder = Path(self.folder)
        if step == -1:
            return -1
        if branch_goes_on(folder, step):
            latest = self._find_load_step()
            logger.info(
                f"checkpoint.load_step = {step}: this run began there, and goes on from step "
                f"{latest} (without {folder / BRANCH} it would begin at {step} again)"
            )
            return latest
        later = {n: path for n, path in step_folders(folder).items() if n > step}
        if later:
            aside = _next_number(folder, "before-")
            aside.mkdir()
            for path in later.values():
                path.rename(aside / path.name)
            logger.warning(
                f"checkpoint.load_step = {step}: {len(later)} later checkpoints are not of this "
                f"run, they are in {aside} now"
            )
        (folder / BRANCH).write_text(json.dumps({"load_step": step}))
        return step

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save if it is time to, whatever ran before: a forward pass without a backward pass
        leaves FSDP's last weights gathered, and the optimizer's state by their names is not found.
        """
        if not self._should_save(curr_step, last_step):
            return
        for part in self.states[MODEL].model:
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        self._clear(curr_step)
        super().save(curr_step, last_step)

    def _clear(self, step: int) -> None:
        """Remove a step that is about to be written again, so that a rank that dies meanwhile
        leaves no mixture of the two that looks finished."""
        folder = Path(self._create_checkpoint_id(step))
        if dist.get_rank() == 0 and folder.exists():
            shutil.rmtree(folder)
        dist.barrier(device_ids=[device_module.current_device()])

    def save_and_leave(self, step: int, trained: bool) -> NoReturn:
        """Save step `step`, unless that has been done, and end the process; all ranks together.

        Args:
            trained: whether this process has made a step: otherwise there is nothing new to save.

        Raises:
            Preempted: always.
        """
        if not self.enable or self.load_only:
            message = f"asked to leave after step {step}: nothing is saved, checkpoints are off"
            logger.warning(message)
            raise Preempted(message)
        if trained and not self._should_save(step):
            self.interval = 1
            self.save(step)
        self._async_wait()
        done = f"step {step} is saved in {self.folder}" if trained else "before the first step"
        message = f"asked to leave: {done}, the same command goes on from there"
        logger.info(message)
        raise Preempted(message)

    def dcp_save(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any):
        """As torchtitan's; an error of the file system names the folder."""
        try:
            with safetensors_format_named():
                return super().dcp_save(state_dict, checkpoint_id, *args, **kwargs)
        except (CheckpointException, OSError) as error:
            raise _named(error, checkpoint_id) from None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, *args: Any, **kwargs: Any):
        """As torchtitan's; bytes that cannot be read are a damaged file, not an error here."""
        try:
            super().dcp_load(state_dict, checkpoint_id, *args, **kwargs)
        except CheckpointException as error:
            raise load_error(error, checkpoint_id) from None

    def _async_wait(self) -> None:
        try:
            super()._async_wait()
        except (CheckpointException, OSError) as error:
            raise _named(error, self.folder) from None

    def _find_load_step(self, folder: str = "") -> int:
        """torchtitan 0.2.2 takes any name that contains `step-N`."""
        path = Path(folder or self.folder)
        return max(finished_steps(path) | exported_steps(path), default=-1)

    def _purge_stale_checkpoints(self) -> None:
        """Likewise: a copy `step-2-best` is the user's to delete. Only whole steps count.

        An asynchronous save has only begun when this is called: what it writes, and what a save
        left that was killed, is nothing to go on from yet.
        """
        if self.keep_latest_k > 0 and dist.get_rank() == 0:
            folder = Path(self.folder)
            whole = sorted(finished_steps(folder) | exported_steps(folder))
            for step in whole[: -self.keep_latest_k]:
                self.purge_queue.put(self._create_checkpoint_id(step))


def _next_number(folder: Path, prefix: str) -> Path:
    """A name in `folder` that is not taken: the prefix with a number above all that are there."""
    numbers = (path.name.removeprefix(prefix) for path in folder.glob(f"{prefix}*"))
    return folder / f"{prefix}{max((int(n) for n in numbers if n.isdecimal()), default=0) + 1}"


def _named(error: BaseException, folder: str) -> BaseException:
    """An error of the file system with the folder it is about; any other as it is."""
    cause: BaseException | None = error
    if isinstance(error, CheckpointException):
        # All ranks get the failures of all; what happened is in the first.
        cause = next(iter(error.failures.values()))[0]
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or cause.errno is None or cause.filename:
        # torch's writer of files loses the number of what its C++ stream says.
        found = re.search(r"No space left on device|Disk quota exceeded", str(error))
        if not found:
            return error
        return OSError(errno.ENOSPC, found[0], folder)
    return OSError(cause.errno, cause.strerror, folder)
