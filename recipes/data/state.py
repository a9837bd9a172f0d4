"""Where a stream of documents or sequences stands, and how a checkpoint keeps that.

States nest as the streams do (recipes/data/streams.py): documents packed within their sources are
`Shares` of `Packs` of `Position`s, documents packed across sources `Packs` of `Shares`.
"""

import math
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from recipes.data.packing import Pending
from recipes.data.sources import Cursor

USED_UP = -math.inf


class Position(NamedTuple):
    """A place in the documents of a source: after `cursor` (None: the start) of a pass."""

    epoch: int = 0
    cursor: Cursor | None = None


class Packs(NamedTuple):
    """The documents read so far, and those of them that wait to be packed."""

    documents: "State"
    pending: list[Pending]

    @property
    def epoch(self) -> int:
        """The pass over the documents, from 0, to which the next sequence belongs."""
        return self.pending[0].epoch if self.pending else self.documents.epoch


class Shares(NamedTuple):
    """Streams that are drawn from in shares of tokens.

    Attributes:
        streams: where each stands.
        owed: tokens that each is behind its share; USED_UP: it has ended.
        given: tokens that each gave since training began, padding not counted.
    """

    streams: tuple["State", ...]
    owed: tuple[float, ...]
    given: tuple[int, ...]

    @property
    def epoch(self) -> int:
        """The pass over the documents that every stream which goes on has at least begun."""
        epochs = [stream.epoch for stream in self.streams]
        going_on = [e for e, owed in zip(epochs, self.owed, strict=True) if owed > USED_UP]
        return min(going_on, default=max(epochs))


State: TypeAlias = Position | Packs | Shares


def to_json(state: State, waiting: BinaryIO) -> dict[str, Any]:
    """`state` as a JSON value; the tokens of documents that wait are written to `waiting`."""
    if isinstance(state, Position):
        return state._asdict()
    if isinstance(state, Packs):
        for document in state.pending:
            waiting.write(document.tokens.astype(np.int32, copy=False).tobytes())
        pending = [[len(tokens), epoch, cut] for tokens, epoch, cut in state.pending]
        return {"documents": to_json(state.documents, waiting), "pending": pending}
    streams = [to_json(stream, waiting) for stream in state.streams]
    return {"streams": streams, "owed": state.owed, "given": state.given}


def from_json(saved: dict[str, Any], waiting: BinaryIO) -> State:
    """The state that `to_json` wrote."""
    if "cursor" in saved:
        return Position(saved["epoch"], saved["cursor"])
    if "pending" in saved:
        pending = [
            Pending(np.frombuffer(waiting.read(4 * length), np.int32), epoch, cut)
            for length, epoch, cut in saved["pending"]
        ]
        return Packs(from_json(saved["documents"], waiting), pending)
    streams = tuple(from_json(stream, waiting) for stream in saved["streams"])
    return Shares(streams, tuple(saved["owed"]), tuple(saved["given"]))
