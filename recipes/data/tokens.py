"""Documents to token ids."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.chat import ChatTemplate, find_chat_template, read_chat_template
from recipes.data.content import Conversation
from recipes.data.files import digest
from recipes.data.records import BadDocument, Record, Row
from recipes.data.targets import with_targets
from recipes.data.token_files import Vocabulary
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

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids (n,) of a text, and (n, 2) where in it each begins and ends, without BOS and EOS."""
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets).reshape(-1, 2)
        # Some tokenizers leave spaces out of the offsets; every character belongs to a token.
        begins = np.minimum(offsets[:, 0], np.concatenate([[0], offsets[:-1, 1]]))
        return np.array(encoding.ids, np.int32), np.stack([begins, offsets[:, 1]], axis=1)

    @cached_property
    def chat(self) -> ChatTemplate:
        """The chat template. Raises ValueError if there is none."""
        return read_chat_template(Path(self.tokenizer_path), self.config or {})

    @property
    def chat_identity(self) -> str:
        """A hash of the text of the chat template, or of none."""
        return digest(find_chat_template(Path(self.tokenizer_path), self.config or {}))

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text and id of the tokens that no text makes by itself, as the end of a turn."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

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


def encode(tokenizer: Any, document: Record, loss_on: str = "all") -> np.ndarray:
    """Token ids (n,) int32 of a document, as `targets` has them.

    A text gets BOS and EOS where the tokenizer has them, a conversation what its template writes.
    Token ids stay as they are. Of a row of a Hugging Face dataset nothing may be left, (0,).

    Args:
        loss_on: which messages of a conversation are learned: "all", those of the "assistant", or
            the "last" of these.

    Raises:
        BadDocument: nothing is left of the document, or it cannot be decoded.
    """
    content = document.content()
    if isinstance(content, np.ndarray):
        return content
    if isinstance(content, Conversation):
        _ = tokenizer.chat  # that there is none is not the document's fault
        try:
            return _encode_conversation(tokenizer, content, loss_on)
        except ValueError as error:
            raise BadDocument(document.place, str(error)) from None
    ids = tokenizer.encode(content, add_bos=True, add_eos=True)
    if all(i in (tokenizer.bos_id, tokenizer.eos_id) for i in ids):
        if not isinstance(document, Row):
            raise BadDocument(document.place, "the tokenizer makes no token of it")
        ids = []
    return np.array(ids, dtype=np.int32)


def _encode_conversation(tokenizer: Any, conversation: Conversation, loss_on: str) -> np.ndarray:
    if loss_on == "all":
        text, spans = tokenizer.chat.render(conversation), None
    else:
        special = tuple(tokenizer.special_tokens)
        text, spans = tokenizer.chat.turns(conversation, special, last=loss_on == "last")
    text.encode("utf-8")  # half of a surrogate pair is no text
    ids, offsets = tokenizer.encode_with_offsets(text)
    if spans is None:
        return ids
    # As transformers does, a token is learned that has a learned character in it.
    learned = np.zeros(len(ids), bool)
    for begin, end in spans:
        first = np.searchsorted(offsets[:, 1], begin, side="right")
        learned[first : np.searchsorted(offsets[:, 0], end)] = True
    return with_targets(ids, learned)


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """What is to be known of a tokenizer to read documents that it made."""
    return Vocabulary(tokenizer.get_vocab_size(), tokenizer.eos_id)


def tokenizer_identity(tokenizer: Any) -> str:
    """A hash of what a tokenizer does: its vocabulary, BOS, EOS, and a probe text encoded.

    Unlike a hash of its files it survives a copy, another file format or a new library version.
    """
    vocabulary = sorted(tokenizer.get_vocab().items())
    probe = tokenizer.encode(_PROBE, add_bos=True, add_eos=True)
    return digest([vocabulary, tokenizer.bos_id, tokenizer.eos_id, probe])
