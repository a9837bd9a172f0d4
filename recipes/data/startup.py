"""What is looked at in the first document of every source, before the first step."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from recipes.config.types import InvalidSetting
from recipes.data.content import Conversation
from recipes.data.records import Record
from recipes.data.sources import PreparedSource, Source
from recipes.data.targets import token_ids
from recipes.data.tokens import encode
from recipes.models.registry import shape_of


def check_fit(config: Any, section: str, sources: Sequence[Source], tokenizer: Any) -> list[str]:
    """See that the first document of every source fits the model and the settings.

    Returns:
        What to warn of.

    Raises:
        InvalidSetting: documents.loss_on that applies to nothing.
        ValueError: a document that does not fit, with its place.
    """
    loss_on = config.documents.loss_on
    warnings: list[str] = []
    conversations = False
    for source in sources:
        if isinstance(source, PreparedSource):
            if section != "evaluation":  # which has no loss on them
                source.check_loss_on(loss_on)
            conversations |= source.loss_on is not None
            continue
        for _, document in islice(source.documents(0, None, rank=0, degree=1), 1):
            if not isinstance(document, Record):
                continue
            content = document.content()
            if isinstance(content, np.ndarray):
                warnings += _check_ids(document.place, content, config, tokenizer)
            elif isinstance(content, Conversation):
                conversations = True
                tokens = encode(tokenizer, document, loss_on)
                if loss_on != "all":  # where what follows the end of a turn is learned, too
                    warnings += _check_end(document.place, tokens, tokenizer)
    if section == "training" and loss_on != "all" and not conversations:
        why = "training reads no conversations"
        raise InvalidSetting("documents.loss_on", loss_on, why, '"all", or a column of messages')
    return warnings


def _check_ids(place: str, tokens: np.ndarray, config: Any, tokenizer: Any) -> list[str]:
    ids = token_ids(tokens)
    size = shape_of(config).vocab_size
    if ids.max() >= size:
        raise ValueError(
            f"{place}: token id {ids.max()}, flavor {config.model.flavor} has 0 to {size - 1}: the "
            "documents were tokenized for another model; name files of this one's token ids"
        )
    if tokenizer.eos_id is not None and ids[-1] != tokenizer.eos_id:
        return [
            f"{place}: the last token is {ids[-1]}, not the tokenizer's EOS {tokenizer.eos_id}; "
            "token ids are taken as they are, and so no end of a document is learned"
        ]
    return []


def _check_end(place: str, tokens: np.ndarray, tokenizer: Any) -> list[str]:
    learned = tokens[tokens >= 0]
    if len(learned) and learned[-1] not in tokenizer.special_tokens.values():
        return [
            f"{place}: the chat template of {tokenizer.chat.name} ends turns of the assistant "
            "without a special token: the model does not learn where to stop"
        ]
    return []
