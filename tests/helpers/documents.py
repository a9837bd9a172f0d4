"""Documents for tests: a tokenizer one can read, files of them, settings, and fingerprints."""

import hashlib
import json
from pathlib import Path
from typing import Any

from recipes.config.schema import StripedJobConfig
from recipes.config.values import get

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
