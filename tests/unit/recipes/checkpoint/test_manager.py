"""The checkpointer loses nothing that somebody could still want."""

import errno
import queue
from pathlib import Path
from traceback import StackSummary

import pytest
from torch.distributed.checkpoint import CheckpointException
from torchtitan.components.checkpoint import CheckpointManager

from recipes.checkpoint.manager import StripedCheckpoints
from recipes.process.faults import explain


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StripedCheckpoints:
    """One on rank 0 over a folder, without the run around it."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    bare = StripedCheckpoints.__new__(StripedCheckpoints)
    bare.enable = False  # nothing to close
    bare.folder = str(tmp_path / "checkpoint")
    bare.keep_latest_k = 2
    bare.purge_queue = queue.Queue()
    return bare


def step(manager: StripedCheckpoints, number: int, *files: str) -> Path:
    path = Path(manager.folder, f"step-{number}")
    path.mkdir(parents=True)
    for file in files:
        (path / file).touch()
    return path


def test_weights_of_another_program_are_kept_beside(manager: StripedCheckpoints) -> None:
    """torchtitan's own export has no config.json."""
    step(manager, 3, "model.safetensors.index.json", "model-00001-of-00001.safetensors")
    manager._forget_unfinished_start()
    assert not Path(manager.folder).exists()
    kept = Path(f"{manager.folder}-unfinished-1", "step-3", "model-00001-of-00001.safetensors")
    assert kept.is_file()


def test_what_died_in_its_first_save_is_removed(manager: StripedCheckpoints) -> None:
    step(manager, 3, "__0_0.distcp")
    manager._forget_unfinished_start()
    assert not Path(manager.folder).exists()


def test_only_whole_steps_count_for_retention(manager: StripedCheckpoints) -> None:
    step(manager, 2, ".metadata")
    step(manager, 3, "__0_0.distcp")  # being written
    step(manager, 4, "__0_0.distcp")  # left by a save that was killed
    manager._purge_stale_checkpoints()
    assert manager.purge_queue.empty()
    oldest = step(manager, 1, ".metadata")
    step(manager, 5, ".metadata")
    manager._purge_stale_checkpoints()
    assert manager.purge_queue.get_nowait() == str(oldest)
    assert manager.purge_queue.empty()


def test_steps_are_set_aside_where_nothing_is(manager: StripedCheckpoints) -> None:
    """Also when an earlier folder of that kind has been deleted."""
    step(manager, 2, ".metadata")
    step(manager, 6, ".metadata")
    Path(manager.folder, "before-2", "step-6").mkdir(parents=True)
    assert manager._begin_branch(2) == 2
    assert Path(manager.folder, "before-3", "step-6", ".metadata").is_file()


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Parent directory: No space left on device"),  # of torch's C++ writer
    ],
)
def test_a_full_disk_names_the_folder(
    manager: StripedCheckpoints, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise CheckpointException("save", {0: (failure, StackSummary())})

    monkeypatch.setattr(CheckpointManager, "dcp_save", fail)
    monkeypatch.setattr(CheckpointManager, "_async_wait", fail)
    folder = f"{manager.folder}/step-2"
    for act, named in (
        (lambda: manager.dcp_save({}, folder), folder),
        (manager._async_wait, str(manager.folder)),
    ):
        with pytest.raises(OSError, match="No space left on device") as error:
            act()
        assert explain(error.value) == (
            f"{named}: No space left on device (--debug shows where)",
            1,
        )
