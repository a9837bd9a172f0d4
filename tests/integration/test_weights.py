"""Weights in and out through the command line: a run from a folder, to a folder, any step."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from recipes.preflight import load_config
from recipes.weights.export import hf_config
from tests.helpers.hf_models import ROPE, load_model, make_model, save_model
from tests.helpers.models import name_settings
from tests.helpers.runs import RECIPE, ROOT, TINY, train

# Weights that do not move: what comes out is what went in.
FROZEN = ("--optimizer.lr", "0", "--training.steps", "2", "--optimizer.weight_decay", "0")
IN_AND_OUT = (
    *("--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf"),
    *("--checkpoint.interval", "1", "--checkpoint.last_save_model_only"),
    *("--rope.on_mismatch", "take"),
)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {n: w for f in folder.glob("*.safetensors") for n, w in load_file(f).items()}


def assert_same_logits(folder: Path, source: Path) -> None:
    tokens = torch.randint(0, 2048, (1, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(load_model(folder)(tokens).logits, load_model(source)(tokens).logits)


class Run(NamedTuple):
    """Folder with weights, in several files and with yarn; dump folder of a 2-rank run from it."""

    source: Path
    dump: Path
    settings: tuple[str, ...]


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_striped", True),
        pytest.param(("llama3_striped", True), marks=pytest.mark.slow),
        pytest.param(("llama3_striped", False), marks=pytest.mark.slow),
        pytest.param(("qwen2_striped", False), marks=pytest.mark.slow),
    ],
    ids=str,
)
def run(request, tmp_path_factory: pytest.TempPathFactory) -> Run:
    name, tied = request.param
    source = save_model(
        tmp_path_factory.mktemp("source"),
        make_model("yarn", name=name, tied=tied),
        max_shard_size="1MB",
    )
    assert len(list(source.glob("*.safetensors"))) > 2
    dump = tmp_path_factory.mktemp("run")
    settings = (*name_settings(name, tied), "--model.hf_assets_path", str(source))
    train(2, dump, *TINY, *FROZEN, *IN_AND_OUT, *settings)
    return Run(source, dump, settings)


def test_export_of_a_run_is_bitwise_what_went_in(run: Run) -> None:
    source, dump, _ = run
    exported = dump / "checkpoint" / "step-2"
    for file in exported.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            assert weights.metadata() == {"format": "pt"}
    before, after = weights_of(source), weights_of(exported)
    assert after.keys() == before.keys()
    for name, weight in before.items():
        assert torch.equal(after[name], weight), name
    assert_same_logits(exported, source)


def test_exported_folder_holds_what_transformers_looks_for(run: Run) -> None:
    source, dump, _ = run
    exported = dump / "checkpoint" / "step-2"
    assert not (exported / "sharded").exists()
    settings = load_model(exported).config
    assert settings.rope_parameters == {**ROPE["yarn"][0]}
    assert settings.max_position_embeddings == 1024
    assert settings.tie_word_embeddings == load_model(source).config.tie_word_embeddings
    assert (settings.bos_token_id, settings.eos_token_id) == (0, 1)
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation == json.loads((source / "generation_config.json").read_text())
    text = "It is a truth universally acknowledged"
    theirs, ours = (AutoTokenizer.from_pretrained(f)(text)["input_ids"] for f in (source, exported))
    assert ours == theirs


def test_generation_works_from_the_exported_folder(run: Run) -> None:
    exported = run.dump / "checkpoint" / "step-2"
    prompt = torch.tensor([[0, 5, 6, 7]])
    out = load_model(exported).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
    )
    assert 5 <= out.shape[1] <= 8


def convert(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/convert_checkpoint.py", *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_any_step_converts_bitwise(run: Run, tmp_path: Path) -> None:
    source, dump, settings = run
    step = dump / "checkpoint" / "step-1"
    settings += ("--rope.on_mismatch", "take")
    out = tmp_path / "out"
    done = convert(RECIPE, step, out, "--dtype", "float32", *settings)
    assert done.returncode == 0, done.stderr
    before, after = weights_of(source), weights_of(out)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], weight) for name, weight in before.items())
    assert_same_logits(out, source)

    for args, message in (
        ((RECIPE, step, out), f"{out}: not an empty folder"),
        ((RECIPE, dump, tmp_path / "new"), f"{dump}: no checkpoint of torch's format"),
        ((RECIPE, step, tmp_path / "new"), "is model.flavor the run's?"),
    ):
        other = ("--model.name", "llama3_striped", "--model.flavor", "1B")
        refused = convert(*args, *settings, *(other if "flavor" in message else ()))
        assert refused.returncode == 2
        assert message in refused.stderr.splitlines()[-1]
        assert "Traceback" not in refused.stderr


def test_a_run_does_not_go_on_from_an_export(run: Run) -> None:
    dump, settings = run.dump, (*IN_AND_OUT, *run.settings, "--training.steps", "4")
    args = ["--job.config_file", RECIPE, *TINY, *settings, "--job.dump_folder", str(dump)]
    unfinished = dump / "checkpoint" / "step-3"  # does not hide the export
    unfinished.mkdir()
    with pytest.raises(ValueError, match=r"checkpoint.load_step = -1: .*step-2 is an export") as e:
        load_config(args, world_size=2)
    unfinished.rmdir()
    assert "allowed: one of [1]" in str(e.value)


def test_config_of_an_extended_model(tmp_path: Path) -> None:
    """theta, scaling and positions as trained, not as they came; kept where nothing changed."""
    source = save_model(tmp_path, make_model("llama3", tied=False))
    base = ["--job.config_file", RECIPE, "--model.hf_assets_path", str(source)]
    hf = json.loads((source / "config.json").read_text())
    extended = ["--rope.theta", "2.8e9", "--rope.scaling", "none", "--training.seq_len", "65536"]
    written = hf_config(load_config([*base, *extended]), hf, "bfloat16")
    assert (written["rope_theta"], written["rope_scaling"]) == (2.8e9, None)
    assert written["max_position_embeddings"] == 65536
    assert written["torch_dtype"] == "bfloat16"
    # As transformers up to 4.51 has it, the factor of YaRN is the quotient of these two.
    yarn = [*ROPE["yarn"][1], "--training.seq_len", "256"]
    written = hf_config(load_config([*base, *yarn]), hf, "bfloat16")
    scaling = written["rope_scaling"]
    original = scaling["original_max_position_embeddings"]
    assert written["max_position_embeddings"] / original == scaling["factor"] == 16.0
    kept = hf_config(load_config([*base, *ROPE["llama3"][1], *TINY]), hf, "float32")
    assert kept["max_position_embeddings"] == 1024
    assert kept["rope_scaling"]["factor"] == 32.0


def test_without_weights_from_elsewhere(tmp_path: Path) -> None:
    """A model of one's own, single precision halved on the way out, one rank."""
    train(
        *(1, tmp_path, *TINY, "--training.steps", "1"),
        *("--parallelism.context_parallel_degree", "1", "--checkpoint.enable"),
        *("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"),
        *("--checkpoint.export_dtype", "bfloat16"),
    )
    exported = tmp_path / "checkpoint" / "step-1"
    assert {w.dtype for w in weights_of(exported).values()} == {torch.bfloat16}
    model = load_model(exported)
    assert model.config.max_position_embeddings == 132
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    assert len(AutoTokenizer.from_pretrained(exported)) == 2048
    shutil.rmtree(exported)
