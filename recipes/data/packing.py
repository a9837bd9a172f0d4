"""Documents of any length into sequences of one length.

`BestFitPacker` keeps documents whole where it can (after "Fewer Truncations Improve Language
Modeling", arXiv 2404.10830, made to stream): every sequence begins with the oldest document that
waits and is filled with the longest ones that still fit. A document longer than a sequence has to
be cut anyway, so it may once, with its head, fill what no whole document fits into: a document of L
tokens lies in at most ceil(L / seq_len) + 1 sequences. Only if none such waits is the rest padding.
The look-ahead is bounded, hence memory too, and the oldest goes first, hence none waits for ever.

`ConcatPacker` joins all documents and cuts every seq_len + 1 tokens, exactly as torchtitan does.

Both work on anything that has a length and can be sliced; nothing is copied here.
"""

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from typing import NamedTuple, Protocol

import numpy as np

# Look-ahead of best fit: sequences, and at least so many tokens (short sequences need more than
# a few documents to choose from).
_LOOKAHEAD_SEQUENCES = 8
_LOOKAHEAD_TOKENS = 65536


class Piece(NamedTuple):
    """A document or a part of it, as it lies in a sequence.

    tokens: (n,) int32, at least one, as `targets` has them.
    following: the document's next token, which is the target of the last one here; None at the
        document's end.
    """

    tokens: np.ndarray
    following: int | None


class Packed(NamedTuple):
    """One sequence: pieces of seq_len tokens together, or fewer (the rest is padding).

    following: the token that follows the last piece in the joined stream even if it belongs to
        another document; None if there is none.
    """

    pieces: list[Piece]
    following: int | None


# A sequence without any target: fills the last batch of a finite data set.
PADDING = Packed([], None)


class Pending(NamedTuple):
    """A document that waits, or what is left of it.

    tokens: (n,) int32, n >= 1, as `targets` has them.
    epoch: the pass over the data in which it was read.
    cut: whether its head lies in a sequence already.
    """

    tokens: np.ndarray
    epoch: int = 0
    cut: bool = False


class Packer(Protocol):
    def add(self, document: Pending) -> None:
        """Take a document; epochs do not decrease."""

    def pop(self, epoch: int = 0, flush: bool = False) -> Packed | None:
        """The next sequence; None while more documents are needed (flush: when none is left).

        epoch: the one that is being read.
        """

    def pending(self) -> list[Pending]:
        """What waits, oldest first. Adding it to an empty packer continues exactly here."""


def _cut(tokens: np.ndarray, length: int) -> Piece:
    return Piece(tokens[:length], int(tokens[length]) if length < len(tokens) else None)


class BestFitPacker:
    """Whole documents, best fit, with a bounded look-ahead."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self._lookahead = max(_LOOKAHEAD_SEQUENCES * seq_len, _LOOKAHEAD_TOKENS)
        # By number, oldest first. (Finding the first key of a plain dict slows down as it drains.)
        self._waiting: OrderedDict[int, Pending] = OrderedDict()
        self._fitting: list[tuple[int, int]] = []  # (length, -number), sorted: longest, oldest last
        self._long: list[int] = []  # numbers of uncut ones longer than a sequence, sorted
        self._tokens = 0
        self._count = 0

    def add(self, document: Pending) -> None:
        self._put(self._count, document)
        self._count += 1
        self._tokens += len(document.tokens)

    def pending(self) -> list[Pending]:
        return list(self._waiting.values())

    def pop(self, epoch: int = 0, flush: bool = False) -> Packed | None:
        if not self._waiting:
            return None
        oldest = next(iter(self._waiting))
        # Small data: to look ahead over more than one epoch only brings the same documents again.
        wrapped = self._waiting[oldest].epoch < epoch
        wanted = self.seq_len if wrapped else self._lookahead
        if self._tokens < wanted and not flush:
            return None
        pieces = [self._take(oldest, self.seq_len)]
        room = self.seq_len - len(pieces[0].tokens)
        while room and (number := self._best(room)) is not None:
            pieces.append(self._take(number, room))
            room -= len(pieces[-1].tokens)
        return Packed(pieces, pieces[-1].following)

    def _best(self, room: int) -> int | None:
        """The longest document that fits whole, else the oldest that must be cut and was not."""
        index = bisect_right(self._fitting, (room, 0))
        if index:
            return -self._fitting[index - 1][1]
        return self._long[0] if self._long else None

    def _take(self, number: int, room: int) -> Piece:
        """Remove up to `room` tokens from the head of a document; what is left keeps its age."""
        tokens, epoch, cut = self._waiting[number]
        if len(tokens) <= self.seq_len:
            self._fitting.pop(bisect_right(self._fitting, (len(tokens), -number)) - 1)
        elif not cut:
            self._long.remove(number)
        piece = _cut(tokens, room)
        self._tokens -= len(piece.tokens)
        if len(tokens) > room:
            self._put(number, Pending(tokens[room:], epoch, cut=True))
        else:
            del self._waiting[number]
        return piece

    def _put(self, number: int, document: Pending) -> None:
        self._waiting[number] = document
        if len(document.tokens) <= self.seq_len:
            insort(self._fitting, (len(document.tokens), -number))
        elif not document.cut:
            insort(self._long, number)


class ConcatPacker:
    """All documents joined and cut every seq_len + 1 tokens.

    The last token of a cut is only a target and the next cut begins after it: torchtitan's
    `HuggingFaceTextDataset`. What is left at the end of the data makes a last, padded sequence.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self._waiting: deque[Pending] = deque()
        self._tokens = 0

    def add(self, document: Pending) -> None:
        self._waiting.append(document)
        self._tokens += len(document.tokens)

    def pending(self) -> list[Pending]:
        return list(self._waiting)

    def pop(self, epoch: int = 0, flush: bool = False) -> Packed | None:
        if not self._tokens or (self._tokens < self.seq_len + 1 and not flush):
            return None
        pieces = []
        room = self.seq_len
        while room and self._waiting:
            piece = self._take(room)
            pieces.append(piece)
            room -= len(piece.tokens)
        following = int(self._take(1).tokens[0]) if self._waiting else None
        return Packed(pieces, following)

    def _take(self, room: int) -> Piece:
        tokens, epoch, _ = self._waiting.popleft()
        piece = _cut(tokens, room)
        self._tokens -= len(piece.tokens)
        if len(tokens) > room:
            self._waiting.appendleft(Pending(tokens[room:], epoch, cut=True))
        return piece


PACKERS: dict[str, type[BestFitPacker] | type[ConcatPacker]] = {
    "pack": BestFitPacker,
    "concat": ConcatPacker,
}
