"""Folders and settings that cannot work: one line each, before any process group exists."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from recipes.models.decoder.config_json import mismatch, model_fields
from recipes.models.registry import MODELS, family_of, shape_of
from recipes.preflight import load_config
from recipes.preflight.weights import check_config_json
from tests.helpers.hf_models import ROPE, make_model, save_model

RECIPE = "train_configs/debug_cpu.toml"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    return save_model(folder, make_model("llama3", tied=True), max_shard_size="1MB")


@pytest.fixture
def folder(sharded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sharded, tmp_path / "model"))


def read(folder: Path, *settings: str) -> Any:
    return load_config(
        [
            *("--job.config_file", RECIPE, "--job.dump_folder", str(folder.parent / "run")),
            *("--model.hf_assets_path", str(folder), "--checkpoint.enable"),
            *("--model.flavor", "debugmodel_tied"),
            *("--checkpoint.initial_load_in_hf", *ROPE["llama3"][1], *settings),
        ],
        world_size=2,
    )


def refusal(folder: Path, *settings: str) -> str:
    with pytest.raises(ValueError, match=": ") as error:
        read(folder, *settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_only_a_tied_model_may_lack_its_head(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    assert refusal(folder).endswith(
        'says tie_word_embeddings = false, the flavor has true; allowed: "debugmodel"'
    )
    line = refusal(folder, "--model.flavor", "debugmodel")
    assert line.endswith("lm_head.weight is missing, tie_word_embeddings is not true")


@pytest.mark.parametrize(
    ("file", "changes", "said"),
    [
        (INDEX, {"weight_map": ["a"]}, "weight_map is no table of names of files"),
        (INDEX, {"weight_map": {"a": "../b"}}, "weight_map is no table of names of files"),
        ("config.json", {"num_attention_heads": "8"}, 'num_attention_heads = "8": '),
        ("config.json", {"max_position_embeddings": "x"}, 'max_position_embeddings = "x": '),
        ("config.json", {"rope_parameters": "x", "rope_scaling": "x"}, "cannot be read"),
    ],
)
def test_files_with_values_of_other_kinds(folder: Path, file: str, changes, said: str) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    line = refusal(folder)
    assert said in line
    assert str(path) in line


def test_a_good_folder_passes(folder: Path) -> None:
    read(folder)
    (folder / INDEX).unlink()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    weights = make_model("llama3", tied=False).state_dict()
    save_file(weights, folder / "model.safetensors")
    read(folder)


def test_missing_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert refusal(folder) == f"{RECIPE}: {shard}: missing, though {INDEX} names it"


def test_shard_cut_off(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{shard}: no whole safetensors file" in refusal(folder)


def test_index_missing(folder: Path) -> None:
    (folder / INDEX).unlink()
    assert f"{folder / INDEX}: missing" in refusal(folder)


def test_index_broken(folder: Path) -> None:
    (folder / INDEX).write_text("{")
    assert f"{folder / INDEX}: not valid JSON" in refusal(folder)


def test_surplus_file(folder: Path) -> None:
    shutil.copyfile(next(folder.glob("*.safetensors")), folder / "old.safetensors")
    assert f"{folder / 'old.safetensors'}: not named by {INDEX}" in refusal(folder)


def test_weights_missing_renamed_or_of_another_shape(folder: Path) -> None:
    shard = next(f for f in folder.glob("*.safetensors") if "model.norm.weight" in load_file(f))
    weights = load_file(shard)
    norm = weights.pop("model.norm.weight")
    save_file(weights, shard)
    assert f"{folder}: model.norm.weight is missing" in refusal(folder)
    save_file(weights | {"model.norm.weight": norm[:-1].contiguous()}, shard)
    assert "model.norm.weight is [127], the flavor has [128]" in refusal(folder)
    save_file(weights | {"model.norm.weight": norm, "model.norm.bias": norm.clone()}, shard)
    assert f"{shard}: model.norm.bias is no weight of the model" in refusal(folder)


def test_wrong_folders(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nothing")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert f'model.hf_assets_path = "{empty}": there is no config.json' in refusal(empty)


def test_folder_in_metas_format(folder: Path) -> None:
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    (folder / "consolidated.00.pth").touch()
    message = refusal(folder)
    assert f"{folder}: no *.safetensors in it: its consolidated.*.pth are Meta's" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 256}, "says hidden_size = 256, the flavor has 128"),
        ({"vocab_size": 4096}, "says vocab_size = 4096, the flavor has 2048"),
        ({"num_key_value_heads": 8}, "says num_key_value_heads = 8, the flavor has 4"),
        ({"model_type": "qwen3"}, 'says model_type = "qwen3", the flavor has "llama"'),
        ({"rms_norm_eps": 1e-6}, "says rms_norm_eps = 1e-06, the flavor has 1e-05"),
        ({"attention_bias": True}, "says attention_bias = true, the flavor has false"),
    ],
)
def test_another_model(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(folder, **changes)
    line = refusal(folder)
    assert 'model.flavor = "debugmodel_tied"' in line
    assert message in line


def test_the_flavor_that_fits_is_named(folder: Path) -> None:
    line = refusal(folder, "--model.flavor", "8B")
    assert 'model.flavor = "8B"' in line
    assert line.endswith('allowed: "debugmodel_tied"')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--rope.theta", "1e6"), "rope.theta = 1000000.0: "),
        (("--rope.scaling", "none"), 'rope.scaling = "none": '),
        (("--rope.scaling_factor", "8"), "rope.scaling_factor = 8.0: "),
        (("--rope.high_freq_factor", "8"), "rope.high_freq_factor = 8.0: "),
        (
            ("--rope.original_max_position_embeddings", "8192"),
            "rope.original_max_position_embeddings = 8192: ",
        ),
    ],
)
def test_rope_mismatch(folder: Path, settings: tuple[str, ...], message: str) -> None:
    line = refusal(folder, *settings)
    assert message in line
    assert f"{folder / 'config.json'} says " in line
    assert 'rope.on_mismatch = "take"' in line
    taken = read(folder, *settings, "--rope.on_mismatch", "take").rope
    assert (taken.theta, taken.scaling, taken.scaling_factor) == (500_000.0, "llama3", 32.0)
    assert taken.original_max_position_embeddings == 64
    changed = read(folder, *settings, "--rope.on_mismatch", "change", "--rope.extrapolate").rope
    value = getattr(changed, settings[0].removeprefix("--rope."))
    assert value == (settings[1] if isinstance(value, str) else float(settings[1]))


# What Meta and Qwen publish with the weights that the recipes start from.
LLAMA3 = {"rope_theta": 500_000.0, "rope_scaling": None, "max_position_embeddings": 8192}
LLAMA31 = {
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "max_position_embeddings": 131072,
}
QWEN3 = {"rope_theta": 1_000_000.0, "rope_scaling": None, "max_position_embeddings": 32768}
FROM_WEIGHTS = [
    path
    for path in sorted(Path("train_configs").glob("*_*b_*.toml"))
    if "initial_load_in_hf = true" in path.read_text()
]


@pytest.mark.parametrize("path", FROM_WEIGHTS, ids=lambda path: path.stem)
def test_shipped_recipes_fit_the_weights_they_name(path: Path, tmp_path: Path) -> None:
    config = load_config(["--job.config_file", str(path), "--model.hf_assets_path", str(tmp_path)])
    of_llama = LLAMA3 if "staged" in path.name else LLAMA31
    of_weights = QWEN3 if "qwen3" in path.name else of_llama
    fields = model_fields(family_of(config), shape_of(config))
    (tmp_path / "config.json").write_text(json.dumps(fields | of_weights))
    check_config_json(config)
    config.rope.on_mismatch = "refuse"
    if "llama3" in path.name and "128k" in path.name:
        check_config_json(config)
    else:
        with pytest.raises(ValueError, match="on_mismatch"):
            check_config_json(config)


@pytest.mark.parametrize("name", ["llama3_striped", "qwen2_striped", "qwen3_striped"])
def test_windows_of_weights_are_never_taken_for_full_attention(name: str) -> None:
    family, shape = MODELS[name], MODELS[name].flavors["debugmodel"]
    hf = model_fields(family, shape)
    plain = hf | {"layer_types": ["full_attention"] * 4, "sliding_window": None}
    assert mismatch(plain, family, shape) is None
    windowed = hf | {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    assert mismatch(windowed, family, shape).startswith('layer_types = ["sliding_attention", ')
    if "qwen" in name:
        on = mismatch(hf | {"sliding_window": 8, "use_sliding_window": True}, family, shape)
        assert on == "use_sliding_window = true, the flavor has false"
    own = replace(shape, windows=(8, None))
    assert mismatch(windowed, family, own) is None
    assert mismatch(hf, family, own) == "sliding_window = null, the flavor has 8"
    assert model_fields(family, own) == windowed
    several = replace(shape, windows=(8, 16))
    assert mismatch(windowed, family, several) == "sliding_window = 8, the flavor has [8, 16]"
    with pytest.raises(ValueError, match=r"windows of \[8, 16\] tokens: .* one size"):
        model_fields(family, several)


def test_sequences_beyond_the_files_positions(folder: Path) -> None:
    line = refusal(folder, "--training.seq_len", "2048")
    assert "training.seq_len = 2048: " in line
    assert "max_position_embeddings = 1024" in line
    read(folder, "--training.seq_len", "2048", "--rope.on_mismatch", "change")


def test_rope_that_cannot_be_expressed(folder: Path) -> None:
    edit_config(folder, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert f'{folder / "config.json"}: rope_type "dynamic"' in refusal(folder)


def test_tokenizer_of_another_model(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    # Ten entries more than the embedding has rows.
    tokenizer["added_tokens"] += [
        tokenizer["added_tokens"][0] | {"id": 2048 + i, "content": f"<|new {i}|>"}
        for i in range(10)
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    line = refusal(folder)
    assert "its tokenizer has 2058 entries, flavor debugmodel_tied has 2048" in line


def test_no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer can be read" in refusal(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--checkpoint.no-enable",), "checkpoint.initial_load_in_hf = true: has no effect"),
        (
            ("--checkpoint.no-initial_load_model_only",),
            "command line: checkpoint.initial_load_model_only = false",
        ),
        (
            ("--checkpoint.last_save_in_hf", "--checkpoint.no-last_save_model_only"),
            "command line: checkpoint.last_save_model_only = false",
        ),
        (
            (
                *("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"),
                "--checkpoint.load_only",
            ),
            "nothing is saved",
        ),
        (("--checkpoint.initial_load_in_hf_quantized",), "floating point"),
    ],
)
def test_settings_that_torchtitan_would_fail_on_late(
    folder: Path, settings: tuple[str, ...], message: str
) -> None:
    assert message in refusal(folder, *settings)
