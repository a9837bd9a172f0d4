"""Training goes on from a checkpoint at another layout of the ranks as if never stopped."""

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from torch.distributed.checkpoint import FileSystemWriter

from recipes.checkpoint.files import finished_steps
from tests.helpers.launch import run_ranks
from tests.helpers.training import COMPILE, CP, PP, ROWS, SEQ_LEN, TP, Job, make_trainer, train

SAVING = (
    *("--checkpoint.enable", "--checkpoint.interval", "2", "--validation.no-enable"),
    "--checkpoint.no-last-save-model-only",
)
STEP = 2
slow = pytest.mark.slow
# name: (ranks, settings)
LAYOUTS = {
    "cp1": (1, ()),
    "cp4": (4, (CP, "4")),
    "cp4 = 2 x 2": (4, (CP, "4", "--striped_cp.ulysses_degree", "2")),
    "tp2": (2, (TP, "2")),
    "pp2": (2, (PP, "2")),
    "cp2 tp2": (4, (CP, "2", TP, "2")),
    "cp2 pp2": (4, (CP, "2", PP, "2")),
    "cp2, checkpointed and compiled": (
        2,
        (CP, "2", "--activation_checkpoint.mode", "full", *COMPILE),
    ),
}
IN_DEFAULT_RUN = ("cp1", "cp4", "cp2 tp2", "cp2 pp2")


def run(ranks: int, folder: Path, *settings: str) -> dict[int, float]:
    """Train up to step 5; displayed losses of the steps that this run made."""
    results = run_ranks(ranks, train, Job(str(folder), (*SAVING, *settings)), timeout=200)
    (shown,) = [result for result in results if result.scalars]
    losses = shown.scalars["loss_metrics/global_avg_loss"]
    # Counted on from the checkpoint, whatever layout wrote it.
    assert shown.scalars["n_tokens_seen"] == {step: step * ROWS * SEQ_LEN for step in losses}
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """A run at cp 2 that saves while it trains, and its losses."""
    folder = tmp_path_factory.mktemp("saved")
    losses = run(2, folder, CP, "2", "--checkpoint.async_mode", "async")
    assert sorted(losses) == [1, 2, 3, 4, 5]
    return folder, losses


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_DEFAULT_RUN else slow) for n in LAYOUTS]
)
def test_resume_at_another_layout(name: str, saved, tmp_path: Path) -> None:
    folder, losses = saved
    source = f"checkpoint/step-{STEP}"
    shutil.copytree(folder / source, tmp_path / source)
    ranks, settings = LAYOUTS[name]
    resumed = run(ranks, tmp_path, *settings)
    assert resumed == pytest.approx({step: losses[step] for step in (3, 4, 5)}, rel=1e-4)


@slow
@pytest.mark.parametrize("layout", [(TP, "2"), (PP, "2")], ids=["tp2", "pp2"])
def test_resume_from_another_layout(layout: tuple[str, ...], tmp_path: Path) -> None:
    losses = run(2, tmp_path, *layout)
    for step in (4, 5):
        shutil.rmtree(tmp_path / f"checkpoint/step-{step}")
    resumed = run(2, tmp_path, CP, "2")
    assert resumed == pytest.approx({step: losses[step] for step in (3, 4, 5)}, rel=1e-4)


def train_and_die_while_saving(job: Job) -> None:
    """Rank 0 is gone after the data of step 4 are written, before it declares them whole."""

    def die(self: FileSystemWriter, metadata, results) -> None:
        if self.path.name == "step-4":
            os._exit(9)
        finish(self, metadata, results)

    finish = FileSystemWriter.finish
    with mock.patch.object(FileSystemWriter, "finish", die):
        train(job)


def test_killed_while_saving(saved, tmp_path: Path) -> None:
    _, losses = saved
    job = Job(str(tmp_path), (*SAVING, CP, "2"))
    with pytest.raises(AssertionError):
        run_ranks(2, train_and_die_while_saving, job)
    assert sorted(p.name for p in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-4"]
    resumed = run(2, tmp_path, CP, "2")
    assert resumed == pytest.approx({step: losses[step] for step in (3, 4, 5)}, rel=1e-4)


def validate_and_save(job: Job) -> list[int]:
    trainer = make_trainer(job)
    trainer.validator.validate(trainer.model_parts, 1)
    trainer.checkpointer.save(1, last_step=True)
    return sorted(finished_steps(Path(trainer.checkpointer.folder)))


@pytest.mark.parametrize("layout", [(CP, "2"), (PP, "2")], ids=["cp2", "pp2"])
def test_a_save_right_after_a_forward_pass(layout: tuple[str, ...], tmp_path: Path) -> None:
    job = Job(str(tmp_path), ("--checkpoint.enable", *layout))
    assert run_ranks(2, validate_and_save, job) == [[1], [1]]


def test_a_branch_goes_on_and_keeps_what_is_not_its_own(saved, tmp_path: Path) -> None:
    folder, losses = saved
    checkpoints = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoints)
    shutil.copytree(checkpoints / "step-4", checkpoints / "step-4-best")
    command = (CP, "2", "--checkpoint.load_step", "2", "--checkpoint.keep_latest_k", "2")
    assert sorted(run(2, tmp_path, *command)) == [3, 4, 5]
    aside = sorted(path.name for path in (checkpoints / "before-1").iterdir())
    assert aside == ["step-4", "step-5"]
    # As if it had been stopped before its last step: the same command goes on from there.
    shutil.rmtree(checkpoints / "step-5")
    resumed = run(2, tmp_path, *command)
    assert resumed == {5: pytest.approx(losses[5], rel=1e-4)}
    assert (checkpoints / "step-4-best").is_dir()
    assert sorted(path.name for path in (checkpoints / "before-1").iterdir()) == aside
