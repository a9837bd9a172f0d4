"""Weights of `transformers` give its logits and losses here, on any number of ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import ModelWrapper

from recipes.data.batch import BatchSharder
from recipes.models.decoder.weights import StateDictAdapter
from striped_cp import unshard_sequence
from tests.helpers.hf_models import ROPE, load_model, make_model, save_model
from tests.helpers.launch import run_ranks
from tests.helpers.model_step import Step
from tests.helpers.models import name_settings

SEQ_LEN = 96
TOLERANCE = 1e-4
SETTINGS = ("--training.seq_len", str(SEQ_LEN))


def load(step: Step, folder: str) -> None:
    """As torchtitan's checkpointer loads Hugging Face weights."""
    model = ModelWrapper(step.parts)
    adapter = StateDictAdapter(step.parts[0].model_args, folder)
    weights = adapter.to_hf(model.state_dict())
    dcp.load(weights, storage_reader=adapter.get_hf_storage_reader(folder))
    model.load_state_dict(adapter.from_hf(weights))


@torch.no_grad()
def errors(folder: str, *settings: str) -> tuple[float, float]:
    """Largest error of a logit, and relative error of the loss."""
    expected = torch.load(f"{folder}/expected.pt")
    step = Step(*SETTINGS, *settings)
    load(step, folder)
    sharder = BatchSharder(step.config, step.dims)
    batch = {"input": expected["tokens"]}, expected["labels"]
    tokens, labels, *_, kwargs = sharder.shard(*batch)
    (model,) = step.parts
    with step.context():
        logits = model(tokens, **kwargs)
        loss = step.loss_fn(model(tokens, **kwargs, labels=labels), labels)
    if sharder.cp_mesh is not None:
        logits = unshard_sequence(logits, mesh=sharder.cp_mesh, layout=sharder.layout)
        torch.distributed.all_reduce(loss, group=sharder.cp_mesh.get_group())
    difference = (logits - expected["logits"]).abs().max().item()
    return difference, abs(loss / expected["loss"] - 1).item()


@torch.no_grad()
def save_expected(
    folder: Path,
    rope: str,
    tied: bool,
    dtype: torch.dtype = torch.float32,
    name: str = "llama3_striped",
) -> None:
    save_model(folder, make_model(rope, name=name, tied=tied).to(dtype))
    model = load_model(folder)
    tokens = torch.randint(0, 2048, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.save(
        {"tokens": tokens, "labels": labels, "logits": logits, "loss": loss},
        folder / "expected.pt",
    )
    assert logits.std() > 0.5  # else a small error would say little


@pytest.mark.parametrize(
    ("name", "rope", "tied"),
    [
        ("llama3_striped", "none", False),
        ("llama3_striped", "llama3", True),
        ("llama3_striped", "yarn", False),
        ("qwen2_striped", "none", True),
        ("qwen2_striped", "yarn", False),
        ("qwen3_striped", "none", False),
        ("qwen3_striped", "yarn", True),
    ],
)
def test_logits_and_loss_are_those_of_transformers(
    tmp_path: Path, name: str, rope: str, tied: bool
) -> None:
    save_expected(tmp_path, rope, tied, name=name)
    for degree in (1, 2, 4):
        settings = (*ROPE[rope][1], *name_settings(name, tied))
        settings += ("--parallelism.context_parallel_degree", str(degree))
        for logits, loss in run_ranks(degree, errors, str(tmp_path), *settings):
            assert logits < TOLERANCE, degree
            assert loss < TOLERANCE, degree


def test_half_precision_files_load_into_float32_weights(tmp_path: Path) -> None:
    save_expected(tmp_path, "llama3", tied=True, dtype=torch.bfloat16)
    settings = (
        *ROPE["llama3"][1],
        *name_settings(tied=True),
        "--parallelism.context_parallel_degree",
        "2",
    )
    for logits, _ in run_ranks(2, errors, str(tmp_path), *settings):
        assert logits < TOLERANCE


def test_wrong_rope_settings_are_seen(tmp_path: Path) -> None:
    """The comparison above can fail."""
    save_expected(tmp_path, "llama3", tied=False)
    settings = (*ROPE["none"][1], "--parallelism.context_parallel_degree", "1")
    ((logits, _),) = run_ranks(1, errors, str(tmp_path), *settings)
    assert logits > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "tied", "ranks", "degrees"),
    [
        # More ranks than key heads: the reordering of the rows crosses the shards.
        ("llama3_striped", True, 6, {"context": 3, "data_shard": 2}),
        ("llama3_striped", False, 4, {"context": 2, "tensor": 2}),
        ("qwen2_striped", False, 4, {"context": 2, "tensor": 2}),
        ("qwen3_striped", True, 4, {"context": 2, "tensor": 2}),
    ],
)
def test_any_sharding_loads(
    tmp_path: Path, name: str, tied: bool, ranks: int, degrees: dict[str, int]
) -> None:
    save_expected(tmp_path, "llama3", tied, name=name)
    settings = [*ROPE["llama3"][1], *name_settings(name, tied), "--memory.loss_chunk_tokens", "0"]
    settings.append("--parallelism.disable_loss_parallel")
    for name, degree in degrees.items():
        key = "data_parallel_shard" if name == "data_shard" else f"{name}_parallel"
        settings += [f"--parallelism.{key}_degree", str(degree)]
    for logits, _ in run_ranks(ranks, errors, str(tmp_path), *settings):
        assert logits < TOLERANCE
