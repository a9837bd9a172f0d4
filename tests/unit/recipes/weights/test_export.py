"""Weights of a checkpoint as a Hugging Face folder: what cannot be read or written is one line."""

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from recipes.models.decoder.model import Transformer
from recipes.preflight import load_config
from recipes.weights.export import convert_checkpoint, write_assets
from tests import ROOT
from tests.helpers.models import flavor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "step-4"
    weights = {name: p.detach() for name, p in Transformer(flavor("debugmodel")).named_parameters()}
    dcp.save(weights, checkpoint_id=folder)
    return folder


def convert(checkpoint: Path, folder: Path) -> str:
    config = load_config(["--job.config_file", "train_configs/debug_cpu.toml"])
    with pytest.raises(ValueError, match=": ") as error:
        convert_checkpoint(checkpoint, folder, config, "float32")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_damaged_or_in_the_way(checkpoint: Path, tmp_path: Path) -> None:
    (data,) = checkpoint.glob("*.distcp")
    whole = data.read_bytes()
    file = tmp_path / "file"
    file.touch()
    assert convert(checkpoint, file / "below").startswith(f"{file / 'below'}: ")
    data.write_bytes(bytes(5000) + whole[5000:])
    assert f"{checkpoint}: damaged, its data cannot be read" in convert(checkpoint, tmp_path / "a")
    data.write_bytes(whole[:-5000])
    assert f"{data}: has {len(whole) - 5000} bytes of" in convert(checkpoint, tmp_path / "b")


@pytest.mark.parametrize(("theirs", "written"), [(None, 2048), (100, 2048), (4096, 4096)])
def test_the_tokenizer_takes_as_long_texts_as_the_model(
    tmp_path: Path, theirs: int | None, written: int
) -> None:
    assets, folder = tmp_path / "assets", tmp_path / "out"
    shutil.copytree(ROOT / "assets/tokenizer", assets)
    settings = {"model_max_length": theirs}
    (assets / "tokenizer_config.json").write_text(json.dumps(settings))
    folder.mkdir()
    write_assets(folder, load_config(["--model.hf_assets_path", str(assets)]), "float32")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == written
