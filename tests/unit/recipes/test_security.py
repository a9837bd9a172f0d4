"""What SECURITY.md promises: a recipe, a checkpoint or a data set runs no code."""

import re
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner

from recipes.preflight import load_config
from recipes.titan.patches import load_without_code
from tests import ROOT

PRODUCT = [
    *(ROOT / "recipes").rglob("*.py"),
    *(ROOT / "striped_cp").rglob("*.py"),
    *(ROOT / "scripts").rglob("*.py"),
    ROOT / "train.py",
]


@pytest.mark.parametrize("key", ["experimental.custom_import", "job.custom_config_module"])
def test_a_recipe_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    (tmp_path / "harmful.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    section, name = key.split(".")
    recipe = tmp_path / "run.toml"
    recipe.write_text(f'[{section}]\n{name} = "harmful"\n')
    with pytest.raises(ValueError, match=re.escape(key)):
        load_config(["--job.config_file", str(recipe)])


def test_who_starts_the_run_may_import() -> None:
    config = load_config(["--experimental.custom_import", "mine"])
    assert config.experimental.custom_import == "mine"


def test_nothing_is_unpickled_but_the_index_of_a_checkpoint() -> None:
    """`recipes.checkpoint.files` restricts what that may name; test_bad_input.py tries it."""
    uses = {
        file.relative_to(ROOT).as_posix()
        for file in PRODUCT
        if re.search(r"\b(pickle|dill|cloudpickle|joblib)\.|Unpickler\b", file.read_text())
    }
    assert uses == {"recipes/checkpoint/files.py"}


def test_torch_loads_weights_only_and_datasets_run_no_code() -> None:
    for file in PRODUCT:
        text = file.read_text()
        for call in re.findall(r"torch\.load\([^)]*\)", text):
            assert "weights_only=True" in call, file
        assert "trust_remote_code=True" not in text, file
        assert not re.search(r"(?<![.\w])(eval|exec)\(", text), file


class Harmful:
    def __reduce__(self) -> tuple:
        return print, ("harmed",)


def test_states_in_a_checkpoint_are_loaded_without_running_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DefaultLoadPlanner, "load_bytes", DefaultLoadPlanner.load_bytes)
    load_without_code()
    good = {"step": 3, "place": "{}", "tokens": b"", "more": b"\xff", "lr": [0.1, None]}
    dcp.save({"state": good}, checkpoint_id=tmp_path / "good")
    loaded: dict = {"state": dict.fromkeys(good)}
    dcp.load(loaded, checkpoint_id=tmp_path / "good")
    assert loaded["state"] == good
    dcp.save({"state": {"step": Harmful()}}, checkpoint_id=tmp_path / "bad")
    with pytest.raises(CheckpointException, match=r"state\.step names code to run; not loaded"):
        dcp.load({"state": {"step": 0}}, checkpoint_id=tmp_path / "bad")
    assert "harmed" not in capsys.readouterr().out
    # Bytes that are no state at all are damage, and not blamed on anyone.
    (data,) = (tmp_path / "good").glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(CheckpointException, match=r"is damaged; not loaded"):
        dcp.load({"state": dict.fromkeys(good)}, checkpoint_id=tmp_path / "good")


def test_tensorboard_listens_on_this_machine_only_in_every_example() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "scripts").glob("*.sh")]
    files += (ROOT / "train_configs").glob("*.toml")
    lines = [line for file in files for line in file.read_text().splitlines()]
    commands = [line for line in lines if re.search(r"\btensorboard\b.*--logdir", line)]
    assert commands
    assert all("--host localhost" in line for line in commands), commands


def test_the_cluster_files_agree_with_each_other() -> None:
    (manifest,) = yaml.safe_load_all((ROOT / "scripts/kubernetes.yaml").read_text())
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert int(environment["NNODES"]) == job["completions"] == job["parallelism"]
    assert int(environment["GRACE_SECONDS"]) < pod["terminationGracePeriodSeconds"]
    script, recipe = container["command"]
    for path in (script, recipe):
        assert (ROOT / path).is_file()
    # Exit status 2 is a wrong setting: it must not be tried again.
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [2]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    slurm = (ROOT / "scripts/multinode.slurm").read_text()
    assert "SRUN_CPUS_PER_TASK" in slurm
    ahead = int(re.search(r"--signal=USR1@(\d+)", slurm)[1])  # type: ignore[index]
    grace = int(re.search(r"GRACE_SECONDS=(\d+)", slurm)[1])  # type: ignore[index]
    assert grace < ahead
