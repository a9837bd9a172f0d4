"""Documents to token ids."""

from typing import Any

import numpy as np

from recipes.data.files import digest
from recipes.data.records import BadDocument, Record
from recipes.data.sources import Row
from recipes.titan import HuggingFaceTokenizer, logger

# Exercises merges, spaces, digits, punctuation and characters outside ASCII.
_PROBE = "It is a truth  universally acknowledged: 2,048 caf\u00e9s \u4e2d\u6587 \U0001f600.\n\n\tA"


class Tokenizer(HuggingFaceTokenizer):
    """torchtitan's, which adds BOS and EOS where it is asked to, and nowhere else.

    A post-processor, as Llama-3's, adds BOS to whatever is encoded, in the middle of a text that is
    put together from pieces, too. tokenizer.json may also say that texts are cut or padded, and
    torchtitan 0.2.2 finds no EOS that is BOS as well (GPT-2's).

    Args:
        path: folder with tokenizer.json (or vocab.json and merges.txt) and tokenizer_config.json.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        eos = self._get_token_from_config(self.config or {}, "eos_token")
        self.eos_id = None if eos is None else self.tokenizer.token_to_id(eos)

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        """Ids of the whole text; BOS and EOS where the tokenizer has them."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        first = [self.bos_id] if add_bos and self.bos_id is not None else []
        last = [self.eos_id] if add_eos and self.eos_id is not None else []
        return [*first, *ids, *last]

    def warn_without_eos(self) -> None:
        """Say that documents will not end with EOS. (To have no BOS is usual.)"""
        if self.eos_id is None:
            file = f"{self.tokenizer_path}/tokenizer_config.json"
            cause = f"{file} is missing" if self.config is None else f"{file} has no eos_token"
            lost = "no EOS" if self.bos_id is not None else "no BOS and no EOS"
            logger.warning(f"{cause}: documents have {lost}")


def build_tokenizer(config: Any) -> Tokenizer:
    """The tokenizer of a run, as torchtitan's trainer asks for it; says what it lacks."""
    tokenizer = Tokenizer(config.model.hf_assets_path)
    tokenizer.warn_without_eos()
    return tokenizer


def encode(tokenizer: Any, document: Record | np.ndarray) -> np.ndarray:
    """Token ids (n,) int32 of a document with BOS and EOS where the tokenizer has them.

    An array is a document that was tokenized before, and stays as it is. Of a row of a Hugging Face
    dataset nothing may be left, (0,).

    Raises:
        BadDocument: nothing is left of the document, or it cannot be decoded.
    """
    if isinstance(document, np.ndarray):
        return document
    ids = tokenizer.encode(document.text(), add_bos=True, add_eos=True)
    if all(i in (tokenizer.bos_id, tokenizer.eos_id) for i in ids):
        if not isinstance(document, Row):
            raise BadDocument(document.place, "the tokenizer makes no token of it")
        ids = []
    return np.array(ids, dtype=np.int32)


def tokenizer_identity(tokenizer: Any) -> str:
    """A hash of what a tokenizer does: its vocabulary, BOS, EOS, and a probe text encoded.

    Unlike a hash of its files it survives a copy, another file format or a new library version.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    probe = tokenizer.encode(_PROBE, add_bos=True, add_eos=True)
    return digest([vocabulary, tokenizer.bos_id, tokenizer.eos_id, probe])
