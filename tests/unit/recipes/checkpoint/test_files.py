"""Which checkpoint a run loads when a save did not finish: only finished ones count."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.checkpoint.saving import forget_unfinished_start
from recipes.config.schema import StripedJobConfig
from recipes.preflight import load_config
from recipes.preflight.evaluation import check_has_weights
from recipes.train.evaluate import step_to_load


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


def test_a_run_that_saves_nothing_removes_nothing(tmp_path: Path) -> None:
    path = unfinished(tmp_path, 10)
    checkpointer = SimpleNamespace(enable=True, load_only=True, folder=str(path.parent))
    forget_unfinished_start(checkpointer)
    assert path.is_dir()
