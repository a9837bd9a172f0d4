"""Documents for tests: a tokenizer one can read, files of them, settings, and fingerprints."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipes.config.schema import StripedJobConfig
from recipes.config.values import get
from recipes.data.shards import FORMAT, MANIFEST, VERSION, write_json, write_shard
from recipes.data.targets import are_targets
from recipes.data.tokens import tokenizer_identity

BOS, EOS = 1, 2


class NumberTokenizer:
    """The text "5 6 7" is the tokens BOS 5 6 7 EOS."""

    bos_id = BOS
    eos_id = EOS

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        ids = [int(word) for word in text.split() if word.isdigit()]
        return [BOS] * add_bos + ids + [EOS] * add_eos

    def get_vocab_size(self) -> int:
        return 100_000

    def get_vocab(self) -> dict[str, int]:
        return {str(n): n for n in range(100_000)}


def number_documents(lengths: list[int]) -> list[str]:
    """Texts of `lengths` tokens, BOS and EOS included; no inner token occurs twice in all."""
    texts = []
    token = 10
    for length in lengths:
        texts.append(" ".join(str(token + i) for i in range(length - 2)))
        token += length - 2
    return texts


def write_jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def write_prepared(folder: Path, tokenizer: Any, *shards: Sequence[Any]) -> Path:
    """A finished folder with the documents of each shard, as prepare_documents.py writes it."""
    folder.mkdir(exist_ok=True)
    entries = []
    for number, documents in enumerate(shards):
        path = folder / f"shard-{number:05d}.arrow"
        arrays = [np.asarray(ids, np.int32) for ids in documents]
        write_shard(path, arrays)
        learned = sum(int(are_targets(ids).sum()) for ids in arrays)
        entries.append({"file": path.name, "bytes": path.stat().st_size, "learned": learned})
    identity = {"path": "elsewhere", "sha256": tokenizer_identity(tokenizer)}
    manifest = {"format": FORMAT, "version": VERSION, "tokenizer": identity, "shards": entries}
    write_json(folder / MANIFEST, manifest)
    return folder


def job(**settings: Any) -> StripedJobConfig:
    """A configuration with `section__key=value` set."""
    config = StripedJobConfig()
    for name, value in settings.items():
        *sections, key = name.split("__")
        setattr(get(config, ".".join(sections)), key, value)
    return config


def fingerprint(batch: tuple) -> str:
    """A hash of a batch: inputs, boundaries, labels."""
    inputs, labels = batch
    parts = [inputs["input"], inputs["boundaries"], labels]
    return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
