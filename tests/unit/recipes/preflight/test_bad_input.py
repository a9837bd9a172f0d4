"""Bad settings and files: one line that names the culprit, exit status 2, before anything runs."""

import errno
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from recipes.data.shards import MANIFEST, read_json, write_json
from recipes.data.tokens import tokenizer_identity
from recipes.launch import main
from recipes.models.decoder.model import Transformer
from recipes.preflight import load_config
from recipes.titan import cpu_host
from striped_cp.kernels import dense
from tests import ROOT
from tests.helpers.documents import NumberTokenizer, write_prepared
from tests.helpers.models import flavor

RECIPE = "train_configs/debug_cpu.toml"


def refusal(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    *args: str,
    recipe: str | Path = RECIPE,
    world_size: int = 2,
) -> str:
    """What rank 0 of a run prints that must be refused."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(SystemExit) as stopped:
        main(["--job.config_file", str(recipe), *args])
    assert stopped.value.code == 2
    output = capfd.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


# A TOML file's text, and what the line must say.
FILES = [
    ("[training\n", "not valid TOML"),
    ("[training]\nsteps = 1\nsteps = 2\n", "not valid TOML"),
    ("[trainning]\nsteps = 1\n", "did you mean training?"),
    ("[training]\nlocal_batchsize = 1\n", "did you mean training.local_batch_size?"),
    ("training = 1\n", "a table [training]"),
    ("[training]\nsteps = true\n", "training.steps = true: wrong type"),
    ('[training]\nsteps = "10"\n', 'training.steps = "10": wrong type'),
    ("[training]\nseq_len = 1e6\n", "training.seq_len = 1000000.0: wrong type"),
    ("[training]\nsteps = 2024-01-01\n", "training.steps = 2024-01-01: wrong type"),
    ("[training]\nsteps = [1]\n", "training.steps = [1]: wrong type"),
    (f"[optimizer]\nlr = {10**400}\n", "wrong type or value; allowed: a number"),
    (f"[training]\nsteps = {2**63}\n", "training.steps = 9223372036854775808: wrong type"),
    ("a = " + "[" * 100_000, "not valid TOML: nested too deeply"),
    ('[job]\ndump_folder = "' + "x" * 5000 + '"\n', "cannot be written to (File name too long)"),
    ('[job]\ndump_folder = "a\\u0000b"\n', "cannot be written to (it has a null byte)"),
    ('[checkpoint]\nfolder = "../elsewhere"\n', "not a folder in job.dump_folder"),
    ('[metrics]\nsave_tb_folder = "/etc"\n', "not a folder in job.dump_folder"),
    ('[metrics]\nsave_tb_folder = ""\n', "not a folder in job.dump_folder"),
    ('[training]\ndataset = "../../etc"\n', "unknown dataset"),
    (
        '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "\u00b2"\n',
        "selective_ac_option",
    ),
    ("[training]\ndataset_path = 5\n", "training.dataset_path = 5: wrong type"),
    ("[checkpoint]\nexclude_from_loading = [1]\n", "a list, each a string"),
    ('[checkpoint]\nasync_mode = "on"\n', '"disabled", "async", "async_with_pinned_mem"'),
    (
        '[model]\nflavor = "7B"\n',
        '"debugmodel_tied", "1B", "3B", "8B", "70B", "405B"',
    ),
    (
        '[experimental]\ncustom_import = "os"\n',
        "--experimental.custom_import os on the command line",
    ),
    ('[job]\ncustom_config_module = "mine"\n', "recipes/config/schema.py"),
]


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_files_of_settings(monkeypatch, capfd, tmp_path, text: str, expected: str) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(text)
    line = refusal(monkeypatch, capfd, recipe=recipe)
    assert line.startswith(f"{recipe}: ")
    assert expected in line


def test_a_file_that_is_no_text(monkeypatch, capfd, tmp_path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_bytes(b"[training]\n\xff\xfe = 1\n")
    assert refusal(monkeypatch, capfd, recipe=recipe).startswith(f"{recipe}: not UTF-8")


@pytest.mark.parametrize(
    ("name", "what"), [("no/such.toml", "no such file"), ("train_configs", "a folder")]
)
def test_a_file_that_is_not_there(monkeypatch, capfd, name: str, what: str) -> None:
    assert refusal(monkeypatch, capfd, recipe=name).startswith(f"{name}: {what}; ")


# One setting of the command line, over a recipe that works, and what the line must say.
SETTINGS = [
    ("training.steps", "0", "at least 1"),
    ("training.steps", "99999999999999999999", "an integer of 64 bits"),
    ("training.local_batch_size", "99999999999999999999", "an integer of 64 bits"),
    ("debug.seed", "99999999999999999999", "an integer of 64 bits"),
    ("comm.init_timeout_seconds", "99999999999999", "1 to 1000000000"),
    ("comm.train_timeout_seconds", "0", "1 to 1000000000"),
    ("training.steps", "many", "training.steps"),
    ("training.seq_len", "1023", "nearest 1022 and 1024"),
    ("training.seq_len", "1000000", "rope.extrapolate"),
    ("training.local_batch_size", "-1", "at least 1"),
    ("training.global_batch_size", "6", "multiples of 4"),
    ("training.max_norm", "-1", "above 0"),
    ("training.dataset", "sampel", '"sample", "local" with dataset_path'),
    ("checkpoint.load_step", "ten", "wrong type or value; allowed: an integer of 64 bits"),
    ("optimizer.lr", "fast", "wrong type or value; allowed: a number"),
    ("training.datset", "local", "did you mean training.dataset?; allowed: the keys of [training]"),
    ("training.local_batch_size", str(2**62), "out of range; allowed: at most 1048576"),
    ("training.dataloader.num_workers", "1000000000", "out of range; allowed: at most 1024"),
    ("training.dataloader.prefetch_factor", str(2**62), "out of range"),
    ("comm.trace_buf_size", str(2**63 - 1), "out of range; allowed: at most 2147483647"),
    ("metrics.save_tb_folder", "x" * 300, "cannot be written to (File name too long)"),
    ("model.hf_assets_path", "no/folder", f"no such folder in {ROOT}"),
    ("training.dataset", "../..", '"sample", "local" with dataset_path'),
    ("training.dataset", "local", "training.dataset_path = null"),
    ("training.dataset_path", "somewhere", 'with dataset = "local"'),
    ("training.dataset_path", "", "out of range; allowed: not empty"),
    ("training.text_column", "body", 'allowed: "text"'),
    ("training.dataset_subset", "en", "with a Hugging Face dataset"),
    ("training.dataloader.num_workers", "-1", "at least 0"),
    ("training.dataloader.prefetch_factor", "0", "at least 1"),
    ("training.dataloader.persistent_workers", None, "the workers are threads"),
    ("training.dataloader.pin_memory", None, "a rank copies too few tokens to gain by it"),
    ("optimizer.name", "SGD", '"Adam", "AdamW"'),
    ("optimizer.lr", "nan", "at least 0"),
    ("optimizer.lr", "-1e-3", "at least 0"),
    ("optimizer.beta1", "1", "below 1"),
    ("optimizer.eps", "0", "above 0"),
    ("optimizer.early_step_in_backward", None, "gradients could not be clipped"),
    ("lr_scheduler.min_lr_factor", "2", "0 to 1"),
    ("lr_scheduler.decay_ratio", "-0.5", "0 to 1"),
    ("lr_scheduler.warmup_steps", "-1", "at least 0"),
    ("lr_scheduler.total_steps", "0", "at least 1"),
    ("metrics.log_freq", "0", "at least 1"),
    ("profiling.profile_freq", "0", "at least 1"),
    ("profiling.enable_memory_snapshot", None, "this host has none"),
    ("checkpoint.interval", "0", "at least 1"),
    ("checkpoint.keep_latest_k", "1", "0 for all, or at least 2"),
    ("checkpoint.load_step", "-2", "-1 or at least 0"),
    ("checkpoint.load_step", "3", "set checkpoint.enable = true"),
    ("checkpoint.async_mode", "async_with_pinned_mem", '"disabled", "async"'),
    ("checkpoint.folder", "", "not a folder in job.dump_folder"),
    ("checkpoint.create_seed_checkpoint", None, "set checkpoint.enable = true"),
    ("checkpoint.initial_load_path", "no/where", "checkpoint.enable"),
    ("job.dump_folder", "", "empty"),
    ("job.dump_folder", "README.md/below", "cannot be written to (Not a directory)"),
    ("job.dump_folder", "/proc/nowhere", "cannot be written to"),
    ("model.hf_assets_path", "no/where", "no such folder"),
    ("model.hf_assets_path", "train_configs", "no tokenizer can be read"),
    ("model.converters", "float8", '"quantize.linear.float8"'),
    ("compile.backend", "onnx", '"inductor"'),
    ("compile.components", "everything", '"model", "loss"'),
    ("activation_checkpoint.mode", "memory_budget", "compile.enable = true"),
    ("activation_checkpoint.memory_budget", "1.5", "0 to 1"),
    ("parallelism.context_parallel_degree", "4", "does not divide 2 ranks"),
    ("parallelism.context_parallel_degree", "3", "nearest 1023 and 1026"),
    ("parallelism.tensor_parallel_degree", "0", "at least 1"),
    ("parallelism.data_parallel_shard_degree", "2", "the ranks are 2"),
    ("parallelism.pipeline_parallel_schedule", "1F2B", '"1F1B"'),
    ("parallelism.pipeline_parallel_layers_per_stage", "0", "at least 1"),
    ("parallelism.enable_async_tensor_parallel", None, "needs tensor_parallel_degree above 1"),
    ("parallelism.context_parallel_rotate_method", "alltoall", "striped_cp.rotate_method"),
    ("striped_cp.block_size", "0", "at least 1"),
    ("striped_cp.ulysses_degree", "0", "at least 1"),
    ("striped_cp.ulysses_degree", "3", "does not divide parallelism.context_parallel_degree = "),
    ("striped_cp.block_size", "1024", "nearest 2048"),
    ("striped_cp.kernel", "flash", "striped_cp.kernel = "),
    ("rope.theta", "0", "above 0"),
    ("rope.low_freq_factor", "4", "below rope.high_freq_factor"),
    ("documents.shuffle_seed", "1", "scripts/prepare_documents.py"),
    ("memory.loss_chunk_tokens", "-5", "at least 0"),
    ("memory.recompute_attention", None, "no effect with"),
    ("memory.offload_checkpoints", None, 'activation_checkpoint.mode = "full"'),
    ("comm.mode", "local_tensor", "scripts/plan.py"),
    ("fault_tolerance.enable", None, "in an experiment only"),
    ("debug.seed", "-1", "at least 0"),
    ("debug.sede", "1", "debug.sede"),
]


@pytest.mark.parametrize(("key", "value", "expected"), SETTINGS)
def test_settings(monkeypatch, capfd, key: str, value: str | None, expected: str) -> None:
    line = refusal(monkeypatch, capfd, f"--{key}", *([] if value is None else [value]))
    assert key in line
    assert expected in line


def test_validation_has_its_own_length_and_data(monkeypatch, capfd) -> None:
    on = ("--validation.enable", "--validation.seq_len")
    assert "multiples of 2 (nearest 510 and 512)" in refusal(monkeypatch, capfd, *on, "511")
    assert "at most 1024" in refusal(monkeypatch, capfd, *on, "2048")
    line = refusal(monkeypatch, capfd, "--validation.enable", "--validation.dataset", "c5")
    assert "validation.dataset" in line


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--profiling.enable_profiling", "--profiling.profile_freq", "3"], "at least 4"),
        (["--model.flavor", "8B", "--checkpoint.enable"], "a checkpoint takes 96.4 GB"),
    ],
)
def test_what_does_not_go_together(monkeypatch, capfd, args: list[str], expected: str) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 10**9))
    assert expected in refusal(monkeypatch, capfd, *args)


def test_a_gpu_that_is_too_old_for_every_fast_kernel(monkeypatch, capfd) -> None:
    monkeypatch.setattr(cpu_host, "is_cpu_host", lambda: False)
    monkeypatch.setattr(dense, "compute_capability", lambda: (7, 5))
    line = refusal(monkeypatch, capfd)
    assert 'striped_cp.kernel = "auto": it needs a GPU of compute capability 8.0 or later' in line
    assert line.endswith("this one has 7.5; allowed: kernels that can: 'reference'")


# Files.


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A finished checkpoint of the debug model, step 4."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint" / "step-4"
    weights = {name: p.detach() for name, p in Transformer(flavor("debugmodel")).named_parameters()}
    dcp.save({**weights, "train_state": {"step": 4}}, checkpoint_id=folder)
    return folder


@pytest.fixture
def resumed(checkpoint: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A copy to damage, and the settings that would load it."""
    shutil.copytree(checkpoint.parent, tmp_path / "checkpoint")
    args = ["--checkpoint.enable", "--job.dump_folder", str(tmp_path)]
    return tmp_path / "checkpoint" / checkpoint.name, args


class Harmful:
    def __reduce__(self) -> tuple:
        return os.system, ("touch harmed",)


def damage(folder: Path, how: str) -> None:
    metadata = folder / ".metadata"
    (data,) = folder.glob("*.distcp")
    match how:
        case "metadata cut off":
            metadata.write_bytes(metadata.read_bytes()[:500])
        case "metadata is text":
            metadata.write_text("no checkpoint")
        case "metadata of something else":
            metadata.write_bytes(pickle.dumps({"step": 4}))
        case "metadata runs code":
            metadata.write_bytes(pickle.dumps(Harmful()))
        case "data cut off":
            data.write_bytes(data.read_bytes()[:1000])
        case "metadata without a table":
            value = pickle.loads(metadata.read_bytes())
            value.state_dict_metadata = None
            metadata.write_bytes(pickle.dumps(value))
        case "metadata with a word for a length":
            value = pickle.loads(metadata.read_bytes())
            next(iter(value.storage_data.values())).length = "long"
            metadata.write_bytes(pickle.dumps(value))
        case "metadata with a word for a state":
            value = pickle.loads(metadata.read_bytes())
            value.state_dict_metadata["train_state.step"] = "four"
            metadata.write_bytes(pickle.dumps(value))
        case "data missing":
            data.unlink()
        case "another model":
            weights = {"layers.0.weight": torch.zeros(2)}
            shutil.rmtree(folder)
            dcp.save(weights, checkpoint_id=folder)
        case "another flavor":
            model = Transformer(flavor("debugmodel"))
            weights = {name: p.detach()[:1] for name, p in model.named_parameters()}
            shutil.rmtree(folder)
            dcp.save(weights, checkpoint_id=folder)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("metadata cut off", r"\.metadata: damaged"),
        ("metadata without a table", r"\.metadata: damaged"),
        ("metadata with a word for a length", r"\.metadata: damaged"),
        ("metadata with a word for a state", r"\.metadata: damaged"),
        ("metadata is text", r"\.metadata: damaged"),
        ("metadata of something else", r"\.metadata: damaged"),
        ("metadata runs code", r"\.metadata: names posix\.system, which no checkpoint does"),
        ("data cut off", r"distcp: has 1000 bytes of \d+"),
        ("data missing", r"distcp: is missing"),
        ("another model", r"tok_embeddings\.weight is missing, a checkpoint of another model"),
        ("another flavor", r"tok_embeddings\.weight is \[1, 128\], model\.flavor"),
    ],
)
def test_checkpoints(monkeypatch, capfd, resumed, how: str, expected: str) -> None:
    folder, args = resumed
    damage(folder, how)
    line = refusal(monkeypatch, capfd, *args)
    assert line.startswith(f"{RECIPE}: {folder}")
    assert re.search(expected, line)
    assert not (ROOT / "harmed").exists()


def test_a_folder_in_the_place_of_a_file(monkeypatch, capfd, resumed) -> None:
    folder, args = resumed
    (folder.parent / "branch.json").mkdir()
    line = refusal(monkeypatch, capfd, *args)
    assert line.endswith("branch.json: a folder in the way of a file; move it elsewhere")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("comm_traces", ("--comm.trace_buf_size", "100")),
        (
            "evaluation",
            ("--evaluation.enable", "--evaluation.lengths", "132", "--evaluation.tasks", "passkey"),
        ),
    ],
)
def test_a_file_in_the_place_of_a_folder(
    monkeypatch, capfd, tmp_path: Path, name: str, settings: tuple[str, ...]
) -> None:
    (tmp_path / name).touch()
    line = refusal(monkeypatch, capfd, "--job.dump_folder", str(tmp_path), *settings)
    assert "cannot be written to" in line
    assert name in line


def test_checkpoints_that_are_not_there(monkeypatch, capfd, resumed) -> None:
    folder, args = resumed
    line = refusal(monkeypatch, capfd, *args, "--checkpoint.load_step", "3")
    assert "checkpoint.load_step = 3" in line
    assert "-1 for the latest, or one of [4]" in line
    new = ("--job.dump_folder", str(folder.parent.parent / "new"))
    load = ("--checkpoint.initial_load_path", str(folder.parent))
    line = refusal(monkeypatch, capfd, *args, *new, *load)
    assert ".metadata is missing" in line


def test_a_checkpoint_without_optimizer_cannot_be_resumed(monkeypatch, capfd, resumed) -> None:
    folder, args = resumed
    weights = {name: p.detach() for name, p in Transformer(flavor("debugmodel")).named_parameters()}
    shutil.rmtree(folder)
    dcp.save(weights, checkpoint_id=folder)
    assert "holds weights only" in refusal(monkeypatch, capfd, *args)


def local(path: Path | str) -> tuple[str, ...]:
    return ("--training.dataset", "local", "--training.dataset_path", str(path))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("books", None, "no such file"),
        ("*.parquet", None, "no such file"),
        ("books.pdf", b"%PDF", "of an unknown kind"),
        ("empty/readme.md", b"", "no file of a kind that can be read"),
    ],
)
def test_data_files(monkeypatch, capfd, tmp_path, name, content, expected: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if content is not None:
        path.write_bytes(content)
    target = path.parent if path.parent != tmp_path else path
    line = refusal(monkeypatch, capfd, *local(target))
    assert "training.dataset_path" in line
    assert expected in line


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        ("not json", "not written by scripts/prepare_documents.py"),
        ('{"format": "other", "version": 1}', "prepare the documents anew"),
    ],
)
def test_prepared_folders(monkeypatch, capfd, tmp_path, manifest: str, expected: str) -> None:
    (tmp_path / MANIFEST).write_text(manifest)
    assert expected in refusal(monkeypatch, capfd, *local(tmp_path))


def test_documents_prepared_with_another_tokenizer(monkeypatch, capfd, tmp_path) -> None:
    tokenizer = NumberTokenizer()
    write_prepared(tmp_path, tokenizer, [range(5)])
    line = refusal(monkeypatch, capfd, *local(tmp_path))
    assert (
        f"was prepared with the tokenizer elsewhere ({tokenizer_identity(tokenizer)[:12]})" in line
    )
    manifest = read_json(tmp_path / MANIFEST)
    (shard,) = manifest["shards"]
    write_json(tmp_path / MANIFEST, manifest | {"shards": [shard | {"bytes": 1}]})
    assert "not 1 bytes long" in refusal(monkeypatch, capfd, *local(tmp_path))
    elsewhere = shard | {"file": "../other/shard-00000.arrow"}
    write_json(tmp_path / MANIFEST, manifest | {"shards": [elsewhere]})
    line = refusal(monkeypatch, capfd, *local(tmp_path))
    assert "names ../other/shard-00000.arrow, outside of its folder" in line


def test_debug_shows_where(monkeypatch, capfd) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit):
        main(["--job.config_file", RECIPE, "--training.steps", "0", "--debug"])
    error = capfd.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1].endswith("allowed: at least 1")


def test_a_run_without_torchrun_says_how_to_start(monkeypatch, capfd) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(["--job.config_file", RECIPE])
    assert stopped.value.code == 2
    line = "train.py: start it with torchrun --nproc_per_node N train.py ...\n"
    assert capfd.readouterr().err == line


def test_what_the_command_line_says_in_two_words(monkeypatch, capfd) -> None:
    line = refusal(monkeypatch, capfd, "--evaluation.tasks", "passkey", "copy")
    assert "a list is written with commas; allowed: --evaluation.tasks passkey,copy" in line


def test_no_recipe_is_no_default_job(monkeypatch, capfd) -> None:
    line = refusal(monkeypatch, capfd, recipe="")
    assert line == '"": no such file; --job.config_file names a TOML file'


def test_a_recipe_that_may_not_be_read(monkeypatch, capfd, tmp_path) -> None:
    recipe = tmp_path / "x.toml"
    recipe.touch()

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    line = refusal(monkeypatch, capfd, recipe=recipe)
    assert line == f"{recipe}: cannot be read (Permission denied)"


def test_a_value_of_several_lines_is_told_in_one(monkeypatch, capfd, tmp_path) -> None:
    recipe = tmp_path / "x.toml"
    recipe.write_text('[optimizer]\nname = """Adam\nor another\n"""\n')
    assert "optimizer.name" in refusal(monkeypatch, capfd, recipe=recipe)


def test_a_file_in_the_way_of_a_step(monkeypatch, capfd, tmp_path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "step-3").touch()
    args = ("--job.dump_folder", str(tmp_path), "--checkpoint.enable")
    assert "a file in the way of a checkpoint" in refusal(monkeypatch, capfd, *args)
    (tmp_path / "file").touch()
    args = ("--job.dump_folder", str(tmp_path / "file"))
    assert "cannot be written to (Not a directory)" in refusal(monkeypatch, capfd, *args)


FLOAT8 = ("--model.converters", "quantize.linear.float8", "--quantize.linear.float8.emulate")
TP = ("--parallelism.context_parallel_degree", "1", "--parallelism.tensor_parallel_degree", "2")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (FLOAT8, 'quantize.linear.float8.filter_fqns = ["output"], not its default []'),
        (
            (*TP, "--parallelism.disable_loss_parallel"),
            "memory.loss_chunk_tokens = 0, not its default 2048",
        ),
    ],
)
def test_a_default_gives_way(settings, told) -> None:
    notes: list[str] = []
    recipe = ROOT / "train_configs" / "debug_cpu.toml"
    load_config(["--job.config_file", str(recipe), *settings], notes=notes)
    assert any(note.startswith(told) for note in notes)
    # Said by the user, it is a contradiction.
    if settings == FLOAT8:
        with pytest.raises(ValueError, match="output projection"):
            load_config([*settings, "--quantize.linear.float8.filter_fqns", "wq"])


def test_float8_takes_rows_in_sixteens() -> None:
    size = ("--training.seq_len", "120", "--training.local_batch_size", "1")
    cp = ("--parallelism.context_parallel_degree", "2")
    with pytest.raises(ValueError, match=r"training\.seq_len = 120: .* there are 60 on 2 ranks"):
        load_config([*FLOAT8, *size, *cp])
