"""What is looked at in the first documents of every source, before the first step."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from recipes.config.types import InvalidSetting
from recipes.data.content import Conversation
from recipes.data.sources import PreparedSource, Source
from recipes.data.targets import are_targets, check_ids, token_ids
from recipes.data.tokens import encode
from recipes.models.registry import shape_of

# Documents among which one with a label is looked for.
_LOOKED_AT = 16


def check_fit(config: Any, section: str, sources: Sequence[Source], tokenizer: Any) -> list[str]:
    """See that the first documents of every source fit the model and the settings.

    Returns:
        What to warn of.

    Raises:
        InvalidSetting: documents.loss_on that applies to nothing.
        ValueError: a document that does not fit, with its place; a source without any label.
    """
    loss_on = config.documents.loss_on
    warnings: list[str] = []
    conversations = False
    for source in sources:
        if isinstance(source, PreparedSource):
            if section != "evaluation":  # which has no loss on them
                source.check_learned(loss_on)
            conversations |= source.loss_on is not None
        for _, document in islice(source.documents(0, None, rank=0, degree=1), 1):
            content = document.content()
            if isinstance(content, str):
                continue
            tokens = encode(tokenizer, document, loss_on)
            check_ids(document.place, tokens, shape_of(config).vocab_size)
            if isinstance(source, PreparedSource):
                continue
            if isinstance(content, Conversation):
                conversations = True
                if loss_on != "all":  # where what follows the end of a turn is learned, too
                    warnings += _check_end(document.place, tokens, tokenizer)
                cause = f'documents.loss_on = "{loss_on}"'
            else:
                warnings += _check_eos(document.place, tokens, tokenizer)
                cause = "labels or loss_mask beside the ids"
            if section != "evaluation" and not are_targets(tokens).any():
                warnings += _check_labels(source, tokenizer, loss_on, cause)
    if section == "training" and loss_on != "all" and not conversations:
        why = "training reads no conversations"
        raise InvalidSetting("documents.loss_on", loss_on, why, '"all", or a column of messages')
    return warnings


def _check_labels(source: Source, tokenizer: Any, loss_on: str, cause: str) -> list[str]:
    """Of a source whose first document has no label: whether the next ones have."""
    places = []
    for _, document in islice(source.documents(0, None, rank=0, degree=1), _LOOKED_AT):
        if are_targets(encode(tokenizer, document, loss_on)).any():
            return []
        places.append(document.place)
    told = f"{places[0]} to {places[-1]}: no token is learned, {cause} leaves none"
    if len(places) < _LOOKED_AT:
        raise ValueError(f"{told}, and there are no other documents")
    return [f"{told}; steps of such documents alone change nothing"]


def _check_eos(place: str, tokens: np.ndarray, tokenizer: Any) -> list[str]:
    (last,) = token_ids(tokens[-1:])
    if tokenizer.eos_id is not None and last != tokenizer.eos_id:
        return [
            f"{place}: the last token is {last}, not the tokenizer's EOS {tokenizer.eos_id}; "
            "token ids are taken as they are, and so no end of a document is learned"
        ]
    return []


def _check_end(place: str, tokens: np.ndarray, tokenizer: Any) -> list[str]:
    learned = tokens[are_targets(tokens)]
    if len(learned) and learned[-1] not in tokenizer.special_tokens.values():
        return [
            f"{place}: the chat template of {tokenizer.chat.name} ends turns of the assistant "
            "without a special token: the model does not learn where to stop"
        ]
    return []
