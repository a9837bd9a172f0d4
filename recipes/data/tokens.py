"""Documents to token ids."""

from typing import Any

import numpy as np

from recipes.data.files import digest
from recipes.data.records import BadDocument, Record
from recipes.titan import HuggingFaceTokenizer, logger

# Exercises merges, spaces, digits, punctuation and characters outside ASCII.
_PROBE = "It is a truth  universally acknowledged: 2,048 caf\u00e9s \u4e2d\u6587 \U0001f600.\n\n\tA"


class Tokenizer(HuggingFaceTokenizer):
    """torchtitan's, which adds BOS and EOS where it is asked to, and nowhere else.

    A post-processor, as Llama-3's, adds BOS to whatever is encoded, in the middle of a text that is
    put together from pieces, too.
    """

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        first = [self.bos_id] if add_bos and self.bos_id is not None else []
        last = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*first, *ids, *last]


def build_tokenizer(config: Any) -> Tokenizer:
    """The tokenizer of a run, as torchtitan's trainer asks for it; says what it lacks."""
    path = config.model.hf_assets_path
    tokenizer = Tokenizer(path)
    missing = [name for name in ("BOS", "EOS") if getattr(tokenizer, f"{name.lower()}_id") is None]
    if missing:
        logger.warning(
            f"{path}: the tokenizer has no {' and no '.join(missing)}: documents are not marked "
            "with it (tokenizer_config.json names them: bos_token, eos_token)"
        )
    return tokenizer


def encode(tokenizer: Any, document: Record | np.ndarray) -> np.ndarray:
    """Token ids (n,) int32 of a document with BOS and EOS where the tokenizer has them.

    An array is a document that was tokenized before, and stays as it is.
    """
    if isinstance(document, np.ndarray):
        return document
    ids = tokenizer.encode(document.text(), add_bos=True, add_eos=True)
    if not ids:
        raise BadDocument(document.place, "the tokenizer makes no token of it")
    return np.array(ids, dtype=np.int32)


def tokenizer_identity(tokenizer: Any) -> str:
    """A hash of what a tokenizer does: its vocabulary, BOS, EOS, and a probe text encoded.

    Unlike a hash of its files it survives a copy, another file format or a new library version.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    probe = tokenizer.encode(_PROBE, add_bos=True, add_eos=True)
    return digest([vocabulary, tokenizer.bos_id, tokenizer.eos_id, probe])
