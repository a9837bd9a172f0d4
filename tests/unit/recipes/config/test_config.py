"""Settings: what is accepted, and the one line that a wrong one gets."""

from pathlib import Path

import pytest

from recipes.config.schema import StripedJobConfig
from recipes.models.registry import MODELS
from recipes.preflight import load_config
from tests import ROOT


def load(toml: str, tmp_path: Path, *args: str, world_size: int | None = None) -> StripedJobConfig:
    path = tmp_path / "run.toml"
    path.write_text(toml)
    return load_config(["--job.config_file", str(path), *args], world_size)


def message(toml: str, tmp_path: Path, *args: str, world_size: int | None = None) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (every test looks at the text)
        load(toml, tmp_path, *args, world_size=world_size)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults() -> None:
    config = load_config([])
    assert config.model.name == "llama3_striped"
    assert config.parallelism.context_parallel_load_balancer == "striped"
    striped = config.striped_cp
    assert (striped.block_size, striped.rotate_method, striped.kernel) == (1, "ring", "auto")
    assert config.documents.mask is True
    rope = config.rope
    assert (rope.theta, rope.scaling, rope.scaling_factor) == (500000.0, "llama3", 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1.0, 4.0)
    assert rope.original_max_position_embeddings == 8192
    memory = config.memory
    assert (memory.loss_chunk_tokens, memory.mlp_chunk_tokens) == (2048, 0)
    assert (memory.recompute_attention, memory.offload_checkpoints) == (False, False)
    assert config.training.dataset == "sample"


def test_validation_follows_training_unless_set(tmp_path: Path) -> None:
    toml = "[training]\nseq_len = 96\nlocal_batch_size = 3\n"
    config = load(toml, tmp_path)
    assert (config.validation.seq_len, config.validation.local_batch_size) == (96, 3)
    config = load(toml + "[validation]\nenable = true\nseq_len = 48\n", tmp_path)
    assert config.validation.seq_len == 48


def test_command_line_wins_over_the_file(tmp_path: Path) -> None:
    toml = "[training]\nsteps = 5\n[optimizer]\nlr = 1\n"
    config = load(toml, tmp_path, "--training.steps", "7")
    assert config.training.steps == 7
    # An integer is good for a number.
    assert config.optimizer.lr == 1.0
    assert type(config.optimizer.lr) is float


@pytest.mark.parametrize(
    ("section", "line", "allowed"),
    [
        ("parallelism", 'context_parallel_degree = "2"', "an integer"),
        ("parallelism", "context_parallel_degree = 2.0", "an integer"),
        ("parallelism", "context_parallel_degree = true", "an integer"),
        ("parallelism", "context_parallel_degree = 0", "at least 1"),
        ("parallelism", "data_parallel_shard_degree = 0", "-1 or at least 1"),
        ("parallelism", 'context_parallel_load_balancer = ""', '"striped", "headtail"'),
        ("parallelism", 'context_parallel_load_balancer = "None"', '"striped", "headtail"'),
        ("parallelism", 'context_parallel_load_balancer = "ptrr"', '"striped", "headtail"'),
        ("parallelism", 'context_parallel_rotate_method = "allgather"', "leave it unset"),
        ("parallelism", 'context_parallel_rotate_method = "bogus"', '"allgather", "alltoall"'),
        ("parallelism", "expert_parallel_degree = 2", "1"),
        ("parallelism", 'pipeline_parallel_schedule = "bogus"', '"1F1B"'),
        ("training", "seq_len = 1e6", "an integer"),
        ("training", "seq_len = -2", "at least 1"),
        ("training", "max_norm = 0", "above 0"),
        ("training", "max_norm = nan", "above 0"),
        ("training", 'dtype = "float16"', '"bfloat16", "float32"'),
        ("model", 'name = "llama3"', '"llama3_striped"'),
        (
            "model",
            'flavor = "7B"',
            '"debugmodel_tied", "1B", "3B", "8B", "70B", "405B"',
        ),
        ("model", 'converters = ["float8"]', '"quantize.linear.float8"'),
        ("model", 'converters = "float8"', "a list, each a string"),
        ("optimizer", 'lr = "1e-3"', "a number"),
        ("metrics", "enable_tensorboard = 1", "true or false"),
        ("striped_cp", "block_size = 0", "at least 1"),
        (
            "striped_cp",
            'kernel = "triton"',
            '"flash", "fa3", "fa4", "cudnn", "flex", "cpu"',
        ),
        ("striped_cp", 'rotate_method = "alltoall"', '"ring", "allgather"'),
        ("documents", 'mask = "yes"', "true or false"),
        ("rope", 'scaling = "linear"', '"none", "llama3", "yarn"'),
        ("rope", "low_freq_factor = 4.0", "below rope.high_freq_factor = 4.0"),
        ("memory", "loss_chunk_tokens = -1", "at least 0"),
        ("validation", "steps = 0", "-1 or at least 1"),
        ("activation_checkpoint", 'selective_ac_option = "ops"', '"op"'),
        ("activation_checkpoint", 'mode = "memory_budget"', "compile.enable = true"),
        ("fault_tolerance", "enable = true", "false"),
        ("comm", 'mode = "fake_backend"', '"default"'),
    ],
)
def test_wrong_values(tmp_path: Path, section: str, line: str, allowed: str) -> None:
    text = message(f"[{section}]\n{line}\n", tmp_path)
    key, value = (part.strip() for part in line.split("="))
    assert f"{section}.{key} = " in text
    assert str(tmp_path / "run.toml") in text
    if value not in ("1e6", "nan"):  # which TOML's reader has made floats of
        assert value in text
    assert "; allowed: " in text
    assert allowed in text.split("; allowed: ")[1]


@pytest.mark.parametrize(
    ("toml", "key", "hint"),
    [
        ("[training]\nsek_len = 5\n", "training.sek_len", "did you mean training.seq_len"),
        ("[striped]\nblock_size = 5\n", "striped", "striped_cp"),
        ("[memory]\nchunk = 5\n", "memory.chunk", "memory.loss_chunk_tokens"),
        ("[training.dataloader]\nworkers = 5\n", "training.dataloader.workers", "num_workers"),
        ("training = 5\n", "training = 5", "a table [training]"),
    ],
)
def test_unknown_keys(tmp_path: Path, toml: str, key: str, hint: str) -> None:
    text = message(toml, tmp_path)
    assert key in text
    assert hint in text


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--training.seq_len", "1e6"], ["training.seq_len", "1e6"]),
        (["--training.sek_len", "5"], ['training.sek_len = "5"', "did you mean training.seq_len?"]),
        (["--trainig.steps=5"], ['trainig = "5"', "did you mean training?", "striped_cp"]),
        (["--training.dataloader.workers", "1"], ["training.dataloader.num_workers"]),
        (["--training.no_steps"], ["training.no_steps", "training.steps"]),
        (["--steps", "5"], ['steps = "5": unknown key']),
        (
            ["--documents.mask", "false"],
            ['documents.mask = "false"', "--documents.mask or --documents.no_mask"],
        ),
        (["--documents.no-mask=1"], ["--documents.mask or --documents.no_mask"]),
        (["--striped_cp.kernel", "bogus"], ["striped_cp.kernel", "bogus", "'flash'"]),
        (["--training.steps=0"], ["training.steps = 0", "at least 1"]),
        (
            ["--parallelism.context_parallel_rotate_method", "allgather"],
            ["parallelism.context_parallel_rotate_method", "striped_cp.rotate_method"],
        ),
    ],
)
def test_wrong_command_lines(tmp_path: Path, args: list[str], parts: list[str]) -> None:
    text = message("", tmp_path, *args)
    assert text.startswith("command line: ")
    for part in parts:
        assert part in text


def test_command_lines_as_the_parser_takes_them() -> None:
    config = load_config(
        [
            *("--documents.no-mask", "--memory.offload_checkpoints"),
            *("--training.seq-len=512", "--optimizer.lr", "1e-3"),
            *("--evaluation.tasks", "passkey,copy"),
        ]
    )
    assert not config.documents.mask
    assert config.memory.offload_checkpoints
    assert config.training.seq_len == 512
    assert config.evaluation.tasks == ["passkey", "copy"]


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nsteps = 7\n", encoding="utf-8-sig")
    assert load_config(["--job.config_file", str(path)]).training.steps == 7


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.toml: no such file"):
        load_config(["--job.config_file", "nowhere.toml"])
    assert "not valid TOML" in message("[training\n", tmp_path)


@pytest.mark.parametrize(
    ("seq_len", "degrees", "nearest"),
    [
        (256, {"context_parallel_degree": 3}, "multiples of 3 (nearest 255 and 258)"),
        (3, {"context_parallel_degree": 4}, "multiples of 4 (nearest 4)"),
        (
            12,
            {"context_parallel_degree": 4, "tensor_parallel_degree": 2},
            "multiples of 8 (nearest 8 and 16)",
        ),
    ],
)
def test_sequences_that_the_ranks_cannot_share(
    tmp_path: Path, seq_len: int, degrees: dict[str, int], nearest: str
) -> None:
    lines = "\n".join(f"{key} = {value}" for key, value in degrees.items())
    text = message(f"[training]\nseq_len = {seq_len}\n[parallelism]\n{lines}\n", tmp_path)
    assert f"training.seq_len = {seq_len}" in text
    for key, value in degrees.items():
        assert f"parallelism.{key} = {value}" in text
    assert nearest in text


def test_stripes_need_no_factor_of_two(tmp_path: Path) -> None:
    for seq_len, degree in ((6, 2), (9, 3), (2, 2)):
        settings = f"[training]\nseq_len = {seq_len}\n[parallelism]\n"
        load(settings + f"context_parallel_degree = {degree}\n", tmp_path)


def test_block_stripes(tmp_path: Path) -> None:
    toml = "[training]\nseq_len = 96\n[parallelism]\ncontext_parallel_degree = 2\n"
    load(toml + "[striped_cp]\nblock_size = 16\n", tmp_path)
    text = message(toml + "[striped_cp]\nblock_size = 64\n", tmp_path)
    assert "striped_cp.block_size = 64" in text
    assert "nearest 128" in text
    other = 'context_parallel_load_balancer = "headtail"\n[striped_cp]\nblock_size = 16\n'
    assert "only stripes have a size" in message(toml + other, tmp_path)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("seq_len = 512", "at most 256"),
        ("seq_len = 255", "multiples of 2 (nearest 254 and 256)"),
    ],
)
def test_validation_sequences(tmp_path: Path, lines: str, expected: str) -> None:
    toml = "[training]\nseq_len = 256\n[parallelism]\ncontext_parallel_degree = 2\n"
    load(toml + f"[validation]\n{lines}\n", tmp_path)  # not enabled
    text = message(toml + f"[validation]\nenable = true\n{lines}\n", tmp_path)
    assert "validation.seq_len = " in text
    assert expected in text


CPU = (ROOT / "train_configs/debug_cpu.toml").read_text()


@pytest.mark.parametrize(
    ("world_size", "args", "parts"),
    [
        (3, [], ["parallelism.context_parallel_degree = 2", "does not divide 3 ranks"]),
        (1, [], ["parallelism.context_parallel_degree = 2", "does not divide 1 ranks"]),
        (
            4,
            ["--parallelism.data_parallel_shard_degree", "4"],
            ["parallelism.data_parallel_shard_degree = 4", "the ranks are 4"],
        ),
        (
            4,
            [
                *("--parallelism.context_parallel_degree", "1"),
                *("--parallelism.data_parallel_replicate_degree", "2"),
                *("--parallelism.tensor_parallel_degree", "2"),
            ],
            ["parallelism.data_parallel_replicate_degree = 2", "does not combine"],
        ),
        (
            4,
            ["--training.global_batch_size", "12"],
            ["training.global_batch_size = 12", "multiples of 8"],
        ),
        (
            8,
            [
                *("--parallelism.context_parallel_degree", "1"),
                *("--parallelism.tensor_parallel_degree", "8"),
            ],
            ["parallelism.tensor_parallel_degree = 8", "divisors of 4"],
        ),
        (2, ["--model.hf_assets_path", "no/where"], ["model.hf_assets_path", "no such folder"]),
        (
            2,
            ["--checkpoint.initial_load_path", "no/where"],
            ["checkpoint.initial_load_path", "checkpoint.enable = true"],
        ),
        (
            2,
            ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"],
            ["checkpoint.create_seed_checkpoint", "WORLD_SIZE is 2"],
        ),
        (2, ["--training.seq_len", "1000000"], ["training.seq_len = 1000000", "rope"]),
    ],
)
def test_launches_that_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, args: list[str], parts: list
) -> None:
    monkeypatch.chdir(ROOT)
    text = message(CPU, tmp_path, *args, world_size=world_size)
    for part in parts:
        assert part in text


@pytest.mark.parametrize(
    "lines",
    [
        ["[validation]", "enable = true", "seq_len = 128"],
        ["[validation]", "enable = true", "local_batch_size = 1"],
        ["[parallelism]", "pipeline_parallel_microbatch_size = 3"],
    ],
)
def test_pipelines_take_one_shape(tmp_path: Path, lines: list[str]) -> None:
    args = ["--parallelism.pipeline_parallel_degree", "2"]
    toml = "[training]\nseq_len = 256\nlocal_batch_size = 4\n" + "\n".join(lines)
    load(toml, tmp_path)
    assert "; allowed: " in message(toml, tmp_path, *args)


def test_every_recipe_is_valid() -> None:
    for path in sorted((ROOT / "train_configs").glob("*.toml")):
        load_config(["--job.config_file", str(path)])


def test_models_are_those_of_the_registry(tmp_path: Path) -> None:
    for name, family in MODELS.items():
        for flavor in family.flavors:
            model = load(f'[model]\nname = "{name}"\nflavor = "{flavor}"\n', tmp_path).model
            assert (model.name, model.flavor) == (name, flavor)
    assert [len(family.flavors) for family in MODELS.values()] == [7, 9, 8]
