"""Which checkpoint a run loads when a save did not finish: only finished ones count."""

import pickle
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
)

from recipes.checkpoint.files import (
    exported_steps,
    finished_steps,
    read_metadata,
    step_folders,
    step_to_load,
)
from recipes.config.schema import StripedJobConfig
from recipes.preflight import load_config
from recipes.preflight.evaluation import check_has_weights


def read(folder: Path, *settings: str, world_size: int | None = None) -> StripedJobConfig:
    recipe = ("--job.config_file", "train_configs/debug_cpu.toml", "--checkpoint.enable")
    return load_config([*recipe, "--job.dump_folder", str(folder), *settings], world_size)


def unfinished(folder: Path, step: int) -> Path:
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    (path / "__0_0.distcp").touch()
    return path


def test_the_newest_finished_checkpoint_is_measured(tmp_path: Path) -> None:
    assert step_to_load(read(tmp_path)) == -1
    for step in (90, 200):
        (unfinished(tmp_path, step) / ".metadata").touch()
    unfinished(tmp_path, 300)
    assert step_to_load(read(tmp_path)) == 200
    assert step_to_load(read(tmp_path, "--checkpoint.load_step", "90")) == 90


def test_an_unfinished_save_does_not_hide_the_weights_to_start_from(tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.mkdir()
    path = unfinished(tmp_path, 10)
    settings = ("--checkpoint.load_only", "--checkpoint.initial_load_path", str(start))
    message = (
        f"{tmp_path}/checkpoint: holds no finished checkpoint, but hides the weights to start "
        "from; remove it, or name another checkpoint.folder (scripts/evaluate.py: --initial)"
    )
    with pytest.raises(ValueError, match="holds no finished") as error:
        read(tmp_path, *settings, "--parallelism.context_parallel_degree", "1", world_size=1)
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)
    assert path.is_dir()


def test_an_unfinished_save_alone_is_nothing_to_measure(tmp_path: Path) -> None:
    unfinished(tmp_path, 10)
    with pytest.raises(ValueError, match="no checkpoint; train first"):
        check_has_weights(read(tmp_path))


@pytest.mark.parametrize("name", ["step-2-best", "my-step-2", "step-02", "step-2.old", "step-"])
def test_only_step_n_is_a_checkpoint(tmp_path: Path, name: str) -> None:
    for step in ("step-1", name):
        path = tmp_path / step
        path.mkdir()
        for file in (".metadata", "config.json"):
            (path / file).touch()
    assert set(step_folders(tmp_path)) == finished_steps(tmp_path) == {1}


def test_an_export_without_its_last_file_is_none(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / "model.safetensors.index.json").touch()
    (tmp_path / "step-1" / "config.json").touch()
    assert exported_steps(tmp_path) == {1}


class _ByName:
    """Pickled as Python 3.11.0 to 3.11.3 pickle the members of an enumeration."""

    def __init__(self, kind: type, name: str) -> None:
        self.reduced = getattr, (kind, name)

    def __reduce__(self) -> tuple:
        return self.reduced


def write_metadata(folder: Path, member: object) -> None:
    metadata = Metadata({"a": BytesStorageMetadata()}, storage_data={}, planner_data={"a": member})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_members_of_enumerations_are_read_as_every_python_writes_them(tmp_path: Path) -> None:
    write_metadata(tmp_path, _ByName(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT"))
    read_metadata(tmp_path)
    write_metadata(tmp_path, _ByName(Metadata, "__init__"))
    with pytest.raises(ValueError, match=r"names builtins\.getattr, which no checkpoint does"):
        read_metadata(tmp_path)
