"""Batches of packed sequences, and the place where they stopped.

The order of the data depends on the data-parallel rank alone: not on the number of workers, nor on
context, tensor or pipeline parallelism. The state of a loader is the position of the last document
read and the documents that wait to be packed, so a resumed run continues with exactly the next
sequence, whatever it lies in the middle of.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from recipes.data.packing import PACKERS, PADDING, Packed, Packer, Pending
from recipes.data.parallel import in_background, ordered_map
from recipes.data.records import Record
from recipes.data.samples import build_sample, collate
from recipes.data.sources import Cursor, Source
from recipes.data.tokens import encode
from recipes.titan import BaseDataLoader, logger

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

REMEDY = 'or set checkpoint.exclude_from_loading = ["dataloader"] to begin the data anew'


class Position(NamedTuple):
    """A place in the documents: after `cursor` (None: the start) of a pass."""

    epoch: int
    cursor: Cursor | None


class State(NamedTuple):
    """Where a loader stands: the documents read so far, and those of them that wait."""

    position: Position
    pending: list[Pending]


class DocumentLoader(BaseDataLoader):
    """Yields ({"input", "boundaries"}, labels); see `samples.collate` for shapes.

    Like torchdata's StatefulDataLoader, `iter()` starts at the beginning, except for the first one
    after `load_state_dict`, which continues there.

    Args:
        source: the documents.
        tokenizer: torchtitan's tokenizer of the model.
        dp_rank, dp_degree: this rank and the number of ranks that read different data.
        seq_len: tokens per sequence, S.
        batch_size: sequences per batch, B.
        packing: "pack" or "concat".
        mask: whether labels stay within documents.
        infinite: whether to begin anew when the documents are used up. Otherwise the last batch
            is filled with rows of padding, so that all have the same shape.
        loss_on: which messages of a conversation are learned, see `tokens.encode`.
        too_long: "cut" documents that are longer than a sequence, or "leave_out".
        share: the rows of every batch that this rank takes.
        num_workers: threads that tokenize; with any, batches are also made ahead of their use.
        prefetch_factor: documents in flight per worker, and batches made ahead.
    """

    def __init__(
        self,
        source: Source,
        tokenizer: Any,
        *,
        dp_rank: int,
        dp_degree: int,
        seq_len: int,
        batch_size: int,
        packing: str,
        mask: bool,
        infinite: bool,
        loss_on: str = "all",
        too_long: str = "cut",
        share: slice = slice(None),
        num_workers: int = 0,
        prefetch_factor: int = 2,
    ) -> None:
        self.source = source
        self.tokenizer = tokenizer
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.packing = packing
        self.mask = mask
        self.infinite = infinite
        self.loss_on = loss_on
        self.too_long = too_long
        self.share = share
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        self._state = self._start = State(Position(0, None), [])
        self._resumed = False
        self._long_documents = 0

    @property
    def epoch(self) -> int:
        """The pass over the documents, from 0, to which the next sequence belongs."""
        position, pending = self._state
        return pending[0].epoch if pending else position.epoch

    def __iter__(self) -> Iterator[Batch]:
        state = self._state if self._resumed else self._start
        self._state, self._resumed = state, False
        batches = self._batches(state)
        if self.num_workers:
            batches = in_background(batches, self.prefetch_factor)
        for batch, self._state in batches:
            yield batch

    def _batches(self, state: State) -> Iterator[tuple[Batch, State]]:
        """Batches after `state`, each with the state after it."""
        rows: list[Packed] = []
        after = state
        for packed, after in self._sequences(state):
            rows.append(packed)
            if len(rows) == self.batch_size:
                yield self._batch(rows), after
                rows = []
        if rows:
            yield self._batch(rows + [PADDING] * (self.batch_size - len(rows))), after

    def _batch(self, rows: list[Packed]) -> Batch:
        return collate([build_sample(row, self.seq_len, self.mask) for row in rows[self.share]])

    def _sequences(self, state: State) -> Iterator[tuple[Packed, State]]:
        """Sequences after `state`, each with the state after it."""
        packer: Packer = PACKERS[self.packing](self.seq_len)
        for document in state.pending:
            packer.add(document)
        position = state.position
        documents = self._documents(position)
        more = True
        last_used = position.epoch  # the last pass of which a document gave a token
        while True:
            while (packed := packer.pop(position.epoch, flush=not more)) is not None:
                yield packed, State(position, packer.pending())
            if not more:
                return
            try:
                position, tokens = next(documents)
                if len(tokens) > self.seq_len:
                    tokens = self._limit(tokens)
                if len(tokens):
                    packer.add(Pending(tokens, position.epoch))
                    last_used = position.epoch
                elif position.epoch > last_used + 1:
                    raise ValueError(
                        "dataset: the tokenizer makes no token of any document, or all are longer "
                        "than a sequence and left out (documents.too_long)"
                    )
            except StopIteration:
                more = False

    def _limit(self, tokens: np.ndarray) -> np.ndarray:
        """What is used of a document that is longer than a sequence; says how many there were."""
        self._long_documents += 1
        if self._long_documents.bit_count() == 1:  # 1, 2, 4, 8, ...
            logger.info(
                f"documents longer than a sequence of {self.seq_len:,} tokens: "
                f"{self._long_documents} {'cut' if self.too_long == 'cut' else 'left out'} so far"
            )
        return tokens if self.too_long == "cut" else tokens[:0]

    def _documents(self, position: Position) -> Iterator[tuple[Position, np.ndarray]]:
        """Tokens of the documents after `position`, each with its own position."""
        records = self._records(position)
        if not self.num_workers:
            yield from map(self._encode, records)
            return
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="tokenizer")
        in_flight = self.num_workers * self.prefetch_factor
        yield from ordered_map(pool, self._encode, records, in_flight)

    def _encode(self, item: tuple[Position, Record | np.ndarray]) -> tuple[Position, np.ndarray]:
        position, document = item
        return position, encode(self.tokenizer, document, self.loss_on)

    def _records(self, position: Position) -> Iterator[tuple[Position, Record | np.ndarray]]:
        epoch, start = position
        while True:
            nothing = start is None
            for cursor, document in self.source.documents(
                epoch, start, self.dp_rank, self.dp_degree
            ):
                nothing = False
                yield Position(epoch, cursor), document
            if nothing:
                raise ValueError(f"dataset: no document for data-parallel rank {self.dp_rank}")
            if not self.infinite:
                return
            epoch, start = epoch + 1, None

    # Checkpoints. The values are strings, bytes and integers, which torch.load(weights_only=True)
    # accepts. The key names the data-parallel rank: all ranks that share it save the same.

    def state_dict(self) -> dict[str, Any]:
        position, pending = self._state
        place = {
            "source": self.source.identity,
            "epoch": position.epoch,
            "cursor": position.cursor,
            "pending": [[len(tokens), epoch, cut] for tokens, epoch, cut in pending],
        }
        tokens = np.concatenate([np.empty(0, np.int32), *(document.tokens for document in pending)])
        return {
            f"dp_rank_{self.dp_rank}": {"place": json.dumps(place), "tokens": tokens.tobytes()},
            "dp_degree": self.dp_degree,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a saved loader stood.

        Raises:
            ValueError: it was saved at another data-parallel degree or read other documents.
        """
        if not state_dict:
            return
        check_degree(state_dict["dp_degree"], self.dp_degree)
        saved = state_dict[f"dp_rank_{self.dp_rank}"]
        place = json.loads(saved["place"])
        if place["source"] != self.source.identity:
            raise ValueError(
                "dataset: the checkpoint was written while reading other documents (files were "
                f"added, removed or changed, or other settings); restore them, {REMEDY}"
            )
        tokens = np.frombuffer(saved["tokens"], np.int32)
        ends = np.cumsum([length for length, _, _ in place["pending"]], dtype=int)
        parts = np.split(tokens, ends)[: len(ends)]
        pending = [
            Pending(part, epoch, cut)
            for part, (_, epoch, cut) in zip(parts, place["pending"], strict=True)
        ]
        self._state = State(Position(place["epoch"], place["cursor"]), pending)
        self._resumed = True


def check_degree(saved: int, current: int) -> None:
    """Raise ValueError if a checkpoint's data was split over another number of ranks."""
    if saved != current:
        raise ValueError(
            f"the checkpoint was saved at data-parallel degree {saved}, this run has {current}: "
            f"the positions in the data belong to {saved} ranks; run at degree {saved} (context-, "
            f"tensor- and pipeline-parallel degrees may change), {REMEDY}"
        )
