"""Documents, sequences packed from them, and several of either drawn in shares of tokens.

    within sources: Documents -> Packing -> Drawing        across: Documents -> Drawing -> Packing

A stream goes on after any state, and hands out every item with the state after it, so whoever
reads ahead knows where the consumer stands.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from recipes.data.packing import PACKERS, Packed, Packer, Pending
from recipes.data.parallel import ordered_map
from recipes.data.records import Record
from recipes.data.sources import Source
from recipes.data.state import USED_UP, Packs, Position, Shares
from recipes.data.targets import check_ids
from recipes.data.tokens import encode
from recipes.titan import logger


@dataclass(frozen=True)
class Member:
    """A source of documents and its part in a mixture; a single source is a mixture of one.

    Attributes:
        name: of its metrics, and in messages.
        weight: its share of the tokens, relative to the weights of the others.
        min_tokens, max_tokens: documents of another length are left out; BOS and EOS count.
        seq_len: documents are cut to so many tokens. None: they are not.
        repeat: whether to begin anew when the documents are used up.
    """

    source: Source
    name: str = "dataset"
    weight: float = 1.0
    min_tokens: int = 1
    max_tokens: int | None = None
    seq_len: int | None = None
    repeat: bool = True


class Stream(Protocol):
    """Items are lists of arrays (`Documents`) or sequences (`Packing`); `Drawing` has either."""

    def start(self) -> Any:
        """The state before the first item."""

    def after(self, state: Any) -> Iterator[tuple[Any, Any]]:
        """The items after `state`, each with the state after it."""


@dataclass(kw_only=True)
class Documents:
    """The documents of one source that one data-parallel rank reads, as token ids.

    An item is a document as the parts into which it is cut: one if it is not, none if it is left
    out, each (n,) int32.

    Args:
        rank, degree: this rank and the number of ranks that read different documents.
        seq_len: tokens of a sequence.
        vocab_size: of the model.
        loss_on: which messages of a conversation are learned, see `tokens.encode`.
        too_long: documents longer than a sequence are "cut" by the packer, or "leave_out".
        num_workers: threads that tokenize.
        prefetch_factor: documents in flight per worker.
    """

    member: Member
    tokenizer: Any
    rank: int
    degree: int
    seq_len: int
    vocab_size: int
    loss_on: str
    too_long: str
    num_workers: int
    prefetch_factor: int
    _long_documents: int = field(default=0, init=False)

    def start(self) -> Position:
        return Position()

    def after(self, state: Position) -> Iterator[tuple[list[np.ndarray], Position]]:
        last_used = state.epoch  # the last pass of which a document gave a token
        for parts, position in self._encoded(self._records(state)):
            if parts and len(parts[0]) > self.seq_len:
                parts = self._limit(parts)
            if parts:
                last_used = position.epoch
            elif position.epoch > last_used + 1:
                raise ValueError(
                    f"{self.member.name}: the tokenizer makes no token of any document, or "
                    "min_tokens, max_tokens or documents.too_long leave all of them out"
                )
            yield parts, position

    def _limit(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        """What is used of a document that is longer than a sequence; says how many there were."""
        self._long_documents += 1
        if self._long_documents.bit_count() == 1:  # 1, 2, 4, 8, ...
            logger.info(
                f"{self.member.name}: documents longer than a sequence of {self.seq_len:,} tokens: "
                f"{self._long_documents} {'cut' if self.too_long == 'cut' else 'left out'} so far"
            )
        return parts if self.too_long == "cut" else []

    def _encoded(
        self, records: Iterator[tuple[Record, Position]]
    ) -> Iterator[tuple[list[np.ndarray], Position]]:
        if not self.num_workers:
            return map(self._encode, records)
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="tokenizer")
        return ordered_map(pool, self._encode, records, self.num_workers * self.prefetch_factor)

    def _encode(self, item: tuple[Record, Position]) -> tuple[list[np.ndarray], Position]:
        document, position = item
        tokens = encode(self.tokenizer, document, self.loss_on)
        check_ids(document.place, tokens, self.vocab_size)
        member = self.member
        most = len(tokens) if member.max_tokens is None else member.max_tokens
        if not max(member.min_tokens, 1) <= len(tokens) <= most:
            return [], position
        length = member.seq_len or len(tokens)
        return [tokens[i : i + length] for i in range(0, len(tokens), length)], position

    def _records(self, state: Position) -> Iterator[tuple[Record, Position]]:
        epoch, start = state
        while True:
            nothing = start is None
            for cursor, document in self.member.source.documents(
                epoch, start, self.rank, self.degree
            ):
                nothing = False
                yield document, Position(epoch, cursor)
            if nothing:
                raise ValueError(
                    f"{self.member.name}: no document for data-parallel rank {self.rank}"
                )
            if not self.member.repeat:
                return
            epoch, start = epoch + 1, None


@dataclass
class Packing:
    """Sequences packed from a stream of documents.

    Args:
        packing: "pack" or "concat".
        seq_len: tokens per sequence.
    """

    documents: Stream
    packing: str
    seq_len: int

    def start(self) -> Packs:
        return Packs(self.documents.start(), [])

    def after(self, state: Packs) -> Iterator[tuple[Packed, Packs]]:
        packer: Packer = PACKERS[self.packing](self.seq_len)
        for document in state.pending:
            packer.add(document)
        place = state.documents
        documents = self.documents.after(place)
        more = True
        while True:
            while (packed := packer.pop(place.epoch, flush=not more)) is not None:
                yield packed, Packs(place, packer.pending())
            if not more:
                return
            try:
                parts, place = next(documents)
            except StopIteration:
                more = False
                continue
            for tokens in parts:
                packer.add(Pending(tokens, place.epoch))


@dataclass
class Drawing:
    """Items of several streams, so that each gives its share of the tokens at any time.

    The next item comes from the stream that is owed most: its share of all tokens so far, less what
    it gave. A stream that ends leaves its share to the others.

    Args:
        size: tokens of an item.
        ahead: sequences that this rank begins as if it had given before, each of `seq_len` tokens:
            ranks that all began with the same stream would be off in step, and together by many.
    """

    streams: Sequence[Stream]
    weights: Sequence[float]
    size: Callable[[Any], int]
    ahead: int
    seq_len: int

    def start(self) -> Shares:
        owed = [0.0] * len(self.streams)
        for _ in range(self.ahead):
            self._charge(owed, _most_owed(owed), self.seq_len)
        places = tuple(stream.start() for stream in self.streams)
        return Shares(places, tuple(owed), (0,) * len(places))

    def after(self, state: Shares) -> Iterator[tuple[Any, Shares]]:
        streams = [s.after(place) for s, place in zip(self.streams, state.streams, strict=True)]
        places, owed, given = list(state.streams), list(state.owed), list(state.given)
        while max(owed) > USED_UP:
            chosen = _most_owed(owed)
            try:
                item, places[chosen] = next(streams[chosen])
            except StopIteration:
                owed[chosen] = USED_UP
                continue
            tokens = self.size(item)
            given[chosen] += tokens
            self._charge(owed, chosen, tokens)
            yield item, Shares(tuple(places), tuple(owed), tuple(given))

    def _charge(self, owed: list[float], chosen: int, tokens: int) -> None:
        """Credit `tokens` to all in their shares, and charge them to the one that gives them."""
        total = sum(w for w, due in zip(self.weights, owed, strict=True) if due > USED_UP)
        for i, weight in enumerate(self.weights):
            owed[i] += tokens * weight / total
        owed[chosen] -= tokens


def _most_owed(owed: Sequence[float]) -> int:
    """The first of those that are owed most."""
    return max(range(len(owed)), key=owed.__getitem__)
