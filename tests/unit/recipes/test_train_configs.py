"""Every shipped recipe is built for real, without its GPUs.

Parsed and checked as at start-up on as many ranks as its first lines launch, its files in place;
its model made on the meta device and spread over a fake process group of that size.
"""

import functools
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.distributed import ParallelDims
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from recipes.checkpoint import files as checkpoint_files
from recipes.config.mixture import sources_of
from recipes.config.values import get
from recipes.data.shards import FORMAT, MANIFEST, VERSION, write_json, write_shard
from recipes.data.tokens import Tokenizer, tokenizer_identity
from recipes.memory import offload
from recipes.models.decoder.args import model_args
from recipes.models.decoder.model import Transformer
from recipes.models.decoder.parallelize import parallelize
from recipes.models.decoder.rope import attention_temperature, inverse_frequencies
from recipes.models.registry import shape_of
from recipes.planner.footprint import plan_memory
from recipes.planner.hardware import GPUS
from recipes.planner.settings import run_from_config
from recipes.preflight import load_config
from recipes.preflight import weights as checks
from tests import ROOT
from tests.unit.recipes.models.decoder.test_rope import hugging_face_config

REPOSITORY = ROOT
RECIPES = sorted(p.stem for p in (REPOSITORY / "train_configs").glob("*_*b_*.toml"))
SEQ_LEN = {"64k": 65_536, "128k": 131_072, "256k": 262_144, "512k": 524_288, "1m": 1_048_576}
# A collective waits for the slowest rank: through loading, a checkpoint, a validation batch.
LEAST_TIMEOUT = {65_536: 300, 131_072: 300, 262_144: 600, 524_288: 1200, 1_048_576: 1800}


def path(name):
    return REPOSITORY / "train_configs" / f"{name}.toml"


def launched_ranks(name):
    """Ranks that the command in a recipe's first lines starts."""
    text = path(name).read_text()
    nodes = re.search(r"--nnodes (\d+)", text)
    per_node = re.search(r"--nproc_per_node (\d+)", text)
    assert f"train_configs/{name}.toml" in text
    assert per_node is not None
    return int(nodes[1] if nodes else 1) * int(per_node[1])


@functools.cache
def settings_of(name):
    return load_config(["--job.config_file", str(path(name))])


def put_files_in_place(config):
    """What a recipe names: assets, documents, an earlier stage, its own checkpoints so far.

    With those the run would go on from them: the weights of a real model are not here.
    """
    shutil.copytree(REPOSITORY / "assets/tokenizer", config.model.hf_assets_path)
    keys = (*sources_of(config, "training"), "validation")
    for data in {get(config, key).dataset_path for key in keys}:
        folder = Path(data.removesuffix("/*.jsonl.gz"))
        folder.mkdir(parents=True)
        if config.documents.loss_on == "all":
            shutil.copy(REPOSITORY / "assets/corpus/austen.jsonl.gz", folder)
        else:
            prepare_conversations(folder, config)
    Path(config.job.dump_folder, config.checkpoint.folder).mkdir(parents=True)
    if config.checkpoint.initial_load_path:
        Path(config.checkpoint.initial_load_path).mkdir(parents=True)


def prepare_conversations(folder, config):
    """A folder as prepare_documents.py writes it, of documents of which a part is learned."""
    write_shard(folder / "shard-00000.arrow", [np.array([~5, 6], np.int32)] * 64)
    shard = {"file": "shard-00000.arrow", "bytes": (folder / "shard-00000.arrow").stat().st_size}
    tokenizer = tokenizer_identity(Tokenizer(config.model.hf_assets_path))
    manifest = {"format": FORMAT, "version": VERSION, "shards": [shard]}
    manifest["tokenizer"] = {"path": config.model.hf_assets_path, "sha256": tokenizer}
    manifest["loss_on"] = config.documents.loss_on
    write_json(folder / MANIFEST, manifest)


def test_the_set_is_complete():
    sizes = {
        f"llama3_{s}_{n}" for s in ("8b", "70b", "405b") for n in ("128k", "256k", "512k", "1m")
    }
    packed = {f"llama3_8b_{n}_packed" for n in ("128k", "256k", "512k", "1m_32gpu")}
    variants = {"llama3_8b_1m_32gpu", "llama3_8b_128k_sft", *packed}
    staged = {f"llama3_8b_staged_{n}" for n in ("64k", "256k", "512k", "1m")}
    mixed = {f"llama3_8b_prolong_{n}" for n in ("64k", "1m")}
    others = {"qwen3_8b_128k", "qwen3_8b_256k", "qwen3_8b_1m", "qwen3_32b_128k"}
    assert set(RECIPES) == sizes | variants | staged | mixed | others


# Hundreds of layers take their time: of 70B and 405B the default suite builds one recipe each.
BUILDS = [
    name if "_8b_" in name or name.endswith("_1m") else pytest.param(name, marks=pytest.mark.slow)
    for name in RECIPES
]


@pytest.mark.parametrize("name", BUILDS)
def test_builds_for_its_ranks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(offload, "host_memory_available", lambda: 2**40)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**50))
    # Not 800 GB of weights: preflight/test_weights.py has what is checked of them.
    monkeypatch.setattr(checks, "loads_hf", lambda config: False)
    # Nor the checkpoint of the stage before: preflight/test_bad_input.py.
    monkeypatch.setattr(checkpoint_files, "checkpoint_to_load", lambda config: None)
    put_files_in_place(settings_of(name))
    ranks = launched_ranks(name)
    config = load_config(["--job.config_file", str(path(name))], ranks)
    settings = config.parallelism
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        dims = ParallelDims(
            dp_replicate=1,
            dp_shard=settings.data_parallel_shard_degree,
            cp=settings.context_parallel_degree,
            tp=settings.tensor_parallel_degree,
            pp=1,
            ep=1,
            etp=1,
            world_size=ranks,
        )
        dims.build_mesh()
        with torch.device("meta"):
            model = Transformer(model_args(config))
        # Recipes that compile do so at the first step; here it is the layout that counts.
        config.compile.enable = False
        parallelize(model, dims, config)
    finally:
        dist.destroy_process_group()
    parameters = list(model.parameters())
    whole = shape_of(config).parameters
    assert sum(p.numel() for p in parameters) == whole
    # Rank 0 holds its share: what does not divide evenly is padded.
    local = sum(p.to_local().numel() for p in parameters)
    assert local == pytest.approx(whole / ranks, rel=0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_settings_for_long_steps(name):
    config = settings_of(name)
    seq_len = SEQ_LEN[re.search(r"_(\d+[km])(_|$)", name)[1]]
    assert config.training.seq_len == config.validation.seq_len == seq_len
    assert config.comm.train_timeout_seconds >= LEAST_TIMEOUT[seq_len]
    assert config.comm.init_timeout_seconds >= 900
    assert config.metrics.log_freq == 1
    assert config.activation_checkpoint.mode == "full"
    assert config.memory.loss_chunk_tokens > 0
    assert config.checkpoint.enable
    assert config.checkpoint.interval <= 50
    assert config.rope.extrapolate is False
    assert config.job.dump_folder == f"outputs/{name}"
    assert len(path(name).read_text().splitlines()) < 120


@pytest.mark.parametrize("name", RECIPES)
def test_fits_its_hardware(name):
    """By the planner, on H100s of 80 GB."""
    config = settings_of(name)
    run = run_from_config(config, launched_ranks(name), GPUS["h100"])
    assert plan_memory(run).total < 0.9 * 80e9


@pytest.mark.parametrize("name", RECIPES)
def test_rope_equals_hugging_face(name):
    rope = settings_of(name).rope
    config = hugging_face_config(rope)
    if rope.scaling == "none":
        expected, factor = 1 / rope.theta ** (torch.arange(0, 128, 2) / 128), 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[rope.scaling](config, "cpu")
    actual = inverse_frequencies(rope, 128)
    torch.testing.assert_close(actual, expected.double(), rtol=1e-6, atol=0)
    assert attention_temperature(rope) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    "stages",
    [
        ("staged_64k", "staged_256k", "staged_512k", "staged_1m"),
        ("prolong_64k", "prolong_1m"),
    ],
)
def test_stages_follow_each_other(stages):
    """Each stage of a staged recipe starts from the last step of the one before."""
    before = None
    for stage in stages:
        config = settings_of(f"llama3_8b_{stage}")
        if before is not None:
            folder = f"{before.job.dump_folder}/{before.checkpoint.folder}"
            expected = f"{folder}/step-{before.training.steps}"
            assert config.checkpoint.initial_load_path == expected
            assert config.rope.theta > before.rope.theta
        else:
            assert config.checkpoint.initial_load_in_hf
        before = config


@pytest.mark.parametrize("name", ["llama3_8b_prolong_64k", "llama3_8b_prolong_1m"])
def test_mixtures(name):
    """Weights that are shares, of prepared or other folders, each packed by itself."""
    training = settings_of(name).training
    assert sum(entry.weight for entry in training.mixture) == pytest.approx(1)
    assert training.mixture_packing == "within"
    long = sum(entry.weight for entry in training.mixture if entry.seq_len is None)
    assert long == pytest.approx(0.2 if name.endswith("1m") else 1)
