"""Documents to token ids."""

from typing import Any

import numpy as np

from recipes.data.files import digest
from recipes.data.records import Record

# Exercises merges, spaces, digits, punctuation and characters outside ASCII.
_PROBE = "It is a truth  universally acknowledged: 2,048 caf\u00e9s \u4e2d\u6587 \U0001f600.\n\n\tA"


def encode(tokenizer: Any, document: Record | np.ndarray) -> np.ndarray:
    """Token ids (n,) int32 of a document with BOS and EOS where the tokenizer has them.

    An array is a document that was tokenized before, and stays as it is.
    """
    if isinstance(document, np.ndarray):
        return document
    ids = tokenizer.encode(document.text(), add_bos=True, add_eos=True)
    return np.array(ids, dtype=np.int32)


def tokenizer_identity(tokenizer: Any) -> str:
    """A hash of what a tokenizer does: its vocabulary, BOS, EOS, and a probe text encoded.

    Unlike a hash of its files it survives a copy, another file format or a new library version.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    probe = tokenizer.encode(_PROBE, add_bos=True, add_eos=True)
    return digest([vocabulary, tokenizer.bos_id, tokenizer.eos_id, probe])
