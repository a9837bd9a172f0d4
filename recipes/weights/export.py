"""Folders that `transformers` loads: what stands beside the weights, and weights of checkpoints."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm import tqdm

from recipes.checkpoint.files import load_error, read_whole
from recipes.config.schema import StripedJobConfig
from recipes.data.tokens import Tokenizer
from recipes.models.decoder.args import model_args
from recipes.models.decoder.config_json import model_fields
from recipes.models.decoder.rope_config import FIELDS, max_positions, read_rope, write_rope
from recipes.models.decoder.weights import (
    StateDictAdapter,
    file_numbers,
    hf_name,
    hf_shapes,
    native_shapes,
)
from recipes.models.registry import family_of, shape_of
from recipes.weights.folder import INDEX, read_json

_TOKENIZER_FILES = (
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


def finish_export(folder: Path, config: StripedJobConfig) -> None:
    """Complete a folder that `checkpoint.last_save_in_hf` wrote; called on every rank.

    torchtitan 0.2.2 writes weights alone, beside the parts of the ranks they were put together
    from.
    """
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "sharded", ignore_errors=True)
        write_assets(folder, config, config.checkpoint.export_dtype)
    dist.barrier()


def write_assets(folder: Path, config: StripedJobConfig, dtype: str) -> None:
    """Write config.json, generation_config.json and the tokenizer.

    Args:
        dtype: of the weights, "float32", "bfloat16" or "float16".
    """
    assets = Path(config.model.hf_assets_path)
    source = read_json(assets / "config.json") if (assets / "config.json").is_file() else {}
    hf = hf_config(config, source, dtype)
    if (assets / "generation_config.json").is_file():
        shutil.copyfile(assets / "generation_config.json", folder / "generation_config.json")
    else:
        ids = {name: hf[name] for name in ("bos_token_id", "eos_token_id")}
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    for name in _TOKENIZER_FILES:
        if (assets / name).is_file():
            shutil.copyfile(assets / name, folder / name)
    if (assets / "tokenizer_config.json").is_file():
        settings = read_json(assets / "tokenizer_config.json")
        longest = hf["max_position_embeddings"]
        # transformers warns of longer texts than this.
        settings["model_max_length"] = max(settings.get("model_max_length") or 0, longest)
        _write_json(folder / "tokenizer_config.json", settings)
    # Last, and at once: the mark of a finished export.
    _write_json(folder / "config.json.part", hf)
    (folder / "config.json.part").rename(folder / "config.json")


def hf_config(config: StripedJobConfig, source: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the model as it was trained.

    Args:
        source: config.json of the folder the tokenizer is from, or empty. Its positions count
            where its RoPE settings were kept: training on shorter sequences takes none away.
    """
    family, shape, rope = family_of(config), shape_of(config), config.rope
    tokenizer = Tokenizer(config.model.hf_assets_path)
    positions = config.training.seq_len
    if rope.scaling == "yarn":
        # Up to version 4.51 transformers takes the factor from these two lengths.
        positions = round(rope.scaling_factor * rope.original_max_position_embeddings)
    elif source:
        theirs = read_rope(source, rope, shape.head_dim, family.theta)
        if all(getattr(rope, n) == getattr(theirs, n) for n in FIELDS[theirs.scaling]):
            positions = max(positions, max_positions(source))
    return {
        "architectures": [family.architecture],
        **model_fields(family, shape),
        **write_rope(rope),
        "max_position_embeddings": positions,
        "bos_token_id": source.get("bos_token_id", tokenizer.bos_id),
        "eos_token_id": source.get("eos_token_id", tokenizer.eos_id),
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": dtype,
        "use_cache": True,
    }


def convert_checkpoint(
    checkpoint: Path, folder: Path, config: StripedJobConfig, dtype: str
) -> None:
    """Write the weights of one step of a run as a Hugging Face folder.

    In one process, one file of the result after the other: it takes the memory of one file.

    Raises:
        ValueError: no checkpoint there, or one of another flavor; the folder is in use.
    """
    args = model_args(config)
    stored = _stored_weights(checkpoint, native_shapes(args))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: not an empty folder; name a new one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{folder}: {error.strerror}; name a new folder") from None
    adapter = StateDictAdapter(args, None)
    numbers = file_numbers(hf_shapes(args))
    native_names = {hf_name(name): name for name in stored}
    count = max(numbers.values())
    weight_map, total = {}, 0
    for number in tqdm(range(1, count + 1), desc="files", disable=None):
        names = [native_names[name] for name, n in numbers.items() if n == number]
        weights = {n: torch.empty(stored[n].size, dtype=stored[n].properties.dtype) for n in names}
        try:
            dcp.load(weights, storage_reader=FileSystemReader(checkpoint), no_dist=True)
        except CheckpointException as error:
            raise load_error(error, checkpoint) from None
        converted = {
            name: weight.to(getattr(torch, dtype)).contiguous()
            for name, weight in adapter.to_hf(weights).items()
        }
        file_name = f"model-{number:05}-of-{count:05}.safetensors"
        save_file(converted, folder / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(converted, file_name))
        total += sum(weight.nbytes for weight in converted.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_assets(folder, config, dtype)


def _stored_weights(
    checkpoint: Path, shapes: dict[str, torch.Size]
) -> dict[str, TensorStorageMetadata]:
    """Shapes and dtypes of the weights in a checkpoint, which must be those of the flavor."""
    stored = read_whole(checkpoint).state_dict_metadata
    weights: dict[str, TensorStorageMetadata] = {}
    for name, shape in shapes.items():
        found = stored.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise ValueError(f"{checkpoint}: {name} is missing; is model.flavor the run's?")
        if found.size != shape:
            sizes = f"{list(found.size)}, the flavor has {list(shape)}"
            raise ValueError(f"{checkpoint}: {name} is {sizes}; is model.flavor the run's?")
        weights[name] = found
    layers = len({n.split(".")[1] for n in shapes if n.startswith("layers.")})
    if f"layers.{layers}.attention.wq.weight" in stored:
        raise ValueError(f"{checkpoint}: more than {layers} layers; is model.flavor the run's?")
    return weights


def _write_json(path: Path, value: Iterable) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
