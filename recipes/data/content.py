"""What a row of a file holds: text, token ids or a conversation, told by its values.

Columns of fixed names beside the one that is asked for belong to it: `labels`, `loss_mask` and
`attention_mask` to token ids, `tools` to messages, `completion` to a column named `prompt`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipes.data.targets import with_targets

# A column that has no other documents than conversations.
MESSAGES = "messages"
BESIDE_IDS = ("labels", "loss_mask", "attention_mask")
BESIDE_MESSAGES = ("completion", "tools")
# Keys of which a message has at least one.
_SAYING = ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")
# Label of a token that is no target, in Hugging Face's data.
_NO_LABEL = -100

EXPECTED = "text, a list of token ids or a list of messages is expected"


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates take them, and the functions that the model may call."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


# Token ids are (n,) int32, as `targets` has them.
Content = str | np.ndarray | Conversation


def content_of(row: Mapping[str, Any], column: str) -> Content:
    """The document in a column, which the row has.

    Raises:
        ValueError: the values make no document; says why, without the place.
    """
    value = row[column]
    if column == "prompt" and "completion" in row:
        messages = [
            *_messages(value, "prompt", role="user"),
            *_messages(row["completion"], "completion", role="assistant"),
        ]
        return Conversation(messages, _tools(row))
    if value is None or isinstance(value, str):
        if value and column == MESSAGES:
            raise ValueError(f"column {column!r} is text, messages are expected")
        return value or ""
    if not isinstance(value, list | np.ndarray):
        raise ValueError(f"column {column!r} is {type(value).__name__}, {EXPECTED}")
    if len(value) and isinstance(value[0], dict):
        return Conversation(_messages(value, column), _tools(row))
    return _ids(row, column)


def without_none(value: Any) -> Any:
    """A value of a table, whose objects all have the keys of any: those that one lacks are None."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value[:1]):
        return [without_none(item) for item in value]
    return value


def _messages(value: Any, column: str, role: str | None = None) -> list[dict[str, Any]]:
    if isinstance(value, str) and role is not None:
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"column {column!r} is {type(value).__name__}, messages are expected")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            found = ", ".join(message) if isinstance(message, dict) else type(message).__name__
            raise ValueError(
                f"message {number} of column {column!r} has no role (found: {found}); role and "
                "content are expected"
            )
        if not any(message.get(key) is not None for key in _SAYING):
            raise ValueError(
                f"message {number} of column {column!r} has neither content nor tool_calls "
                f"(found: {', '.join(message)})"
            )
    return value


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        # As files keep them whose rows all have one type.
        try:
            tools = json.loads(tools) if tools else None
        except ValueError as error:
            raise ValueError(f"column 'tools' is no JSON ({error})") from None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    ):
        raise ValueError("column 'tools' is no list of objects")
    return tools or None


def _ids(row: Mapping[str, Any], column: str) -> np.ndarray:
    ids = _integers(row, column)
    if ids.dtype.kind == "b":
        raise ValueError(f"column {column!r} has true and false, token ids are expected")
    if not len(ids):
        raise ValueError(f"column {column!r} is empty")
    if ids.min() < 0 or ids.max() >= 1 << 31:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise ValueError(f"column {column!r} has {wrong}, which is no token id")
    given = {name: _integers(row, name) for name in BESIDE_IDS if row.get(name) is not None}
    for name, values in given.items():
        if len(values) != len(ids):
            raise ValueError(f"column {name!r} has {len(values)} values for {len(ids)} token ids")
    learned = _flags(given, "loss_mask", ids)
    if "labels" in given:
        labels = given["labels"]
        has_label = labels != _NO_LABEL
        wrong_labels = np.flatnonzero(has_label & (labels != ids))
        if len(wrong_labels):
            raise ValueError(
                f"column 'labels' differs from the token ids at token {wrong_labels[0] + 1}: "
                "labels are expected unshifted, the token's own id or -100"
            )
        learned &= has_label
    kept = np.flatnonzero(_flags(given, "attention_mask", ids))
    if not len(kept):
        raise ValueError("column 'attention_mask' leaves no token")
    inside = slice(kept[0], kept[-1] + 1)
    if len(ids[inside]) != len(kept):
        raise ValueError(
            "column 'attention_mask' has zeros between ones: only padding at the ends can be cut "
            "off; make documents of the parts"
        )
    if learned.all():
        return ids[inside].astype(np.int32, copy=False)
    return with_targets(ids[inside], learned[inside])


def _flags(given: Mapping[str, np.ndarray], name: str, ids: np.ndarray) -> np.ndarray:
    values = given.get(name)
    if values is None:
        return np.ones(len(ids), bool)
    if not np.isin(values, (0, 1)).all():
        raise ValueError(f"column {name!r} has other values than 0 and 1")
    return values.astype(bool)


def _integers(row: Mapping[str, Any], column: str) -> np.ndarray:
    try:
        values = np.asarray(row[column])
    except ValueError:  # lists of different lengths
        values = np.empty((0, 0))
    if values.ndim == 1 and not len(values):
        return np.empty(0, np.int32)
    if values.ndim != 1 or values.dtype.kind not in "iub":
        raise ValueError(f"column {column!r} is no list of integers; {EXPECTED}")
    return values
