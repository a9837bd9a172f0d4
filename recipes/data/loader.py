"""Batches of packed sequences, and the place where they stopped.

The order of the data depends on the data-parallel rank alone: not on the number of workers, nor on
context, tensor or pipeline parallelism. The state of a loader is the position of the last document
read and the documents that wait to be packed, of every source, so a resumed run continues with
exactly the next sequence, whatever it lies in the middle of.
"""

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from recipes.data.files import digest
from recipes.data.labels import build_sample, collate
from recipes.data.packing import PADDING, Packed
from recipes.data.parallel import in_background
from recipes.data.state import USED_UP, Packs, Shares, from_json, to_json
from recipes.data.streams import Documents, Drawing, Member, Packing, Stream
from recipes.titan import BaseDataLoader, logger

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]

# Shares of a mixture hold in so many sequences: those that all ranks read at the same time are, put
# together, so many of the order of one rank.
_WINDOW = 1000

REMEDY = 'or set checkpoint.exclude_from_loading = ["dataloader"] to begin the data anew'


class Given(NamedTuple):
    """What a source gave to this data-parallel rank.

    tokens: since training began. epoch: the pass over its documents, from 0, to which its next
    tokens belong.
    """

    tokens: int
    epoch: int


class DocumentLoader(BaseDataLoader):
    """Yields ({"input", "boundaries"}, labels); see `labels.collate` for shapes.

    Like torchdata's StatefulDataLoader, `iter()` starts at the beginning, except for the first one
    after `load_state_dict`, which continues there. When no source goes on, the last batch is filled
    with rows of padding, so that all have the same shape.

    Args:
        members: the sources of the documents.
        tokenizer: torchtitan's tokenizer of the model.
        dp_rank, dp_degree: this rank and the number of ranks that read different data.
        seq_len: tokens per sequence, S.
        vocab_size: of the model.
        batch_size: sequences per batch, B.
        packing: "pack" or "concat".
        mask: whether labels stay within documents.
        across: whether a sequence may hold documents of several sources.
        loss_on, too_long: as in `streams.Documents`.
        share: the rows of every batch that this rank takes.
        num_workers: threads that tokenize, for every source; with any, batches are also made ahead
            of their use.
        prefetch_factor: documents in flight per worker, and batches made ahead.
    """

    def __init__(
        self,
        members: Sequence[Member],
        tokenizer: Any,
        *,
        dp_rank: int,
        dp_degree: int,
        seq_len: int,
        vocab_size: int,
        batch_size: int,
        packing: str,
        mask: bool,
        across: bool = False,
        loss_on: str = "all",
        too_long: str = "cut",
        share: slice = slice(None),
        num_workers: int = 0,
        prefetch_factor: int = 2,
    ) -> None:
        self.members = members
        self.dp_rank = dp_rank
        self.dp_degree = dp_degree
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.mask = mask
        self.across = across
        self.share = share
        self.num_workers = num_workers
        self.prefetch_factor = prefetch_factor
        documents = [
            Documents(
                member=member,
                tokenizer=tokenizer,
                rank=dp_rank,
                degree=dp_degree,
                seq_len=seq_len,
                vocab_size=vocab_size,
                loss_on=loss_on,
                too_long=too_long,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
            )
            for member in members
        ]
        weights = [member.weight for member in members]
        ahead = dp_rank * _WINDOW // dp_degree
        self.sequences: Stream
        if across:
            mixed = Drawing(documents, weights, _tokens_of_parts, ahead, seq_len)
            self.sequences = Packing(mixed, packing, seq_len)
        else:
            packed = [Packing(one, packing, seq_len) for one in documents]
            self.sequences = Drawing(packed, weights, _tokens_of_packed, ahead, seq_len)
        self._state: Packs | Shares = self.sequences.start()
        self._resumed = False

    @property
    def identity(self) -> str:
        """Tells whether a saved place still means the same: the documents, and how they are mixed.

        Names and weights may change: they say nothing about places.
        """
        identities = [member.source.identity for member in self.members]
        return identities[0] if len(identities) == 1 else digest([self.across, *identities])

    @property
    def epoch(self) -> int:
        """The pass over the documents, from 0, to which the next sequence belongs.

        Of a mixture the least of its sources, those that have ended left out.
        """
        return self._state.epoch

    @property
    def given(self) -> dict[str, Given]:
        """What every source gave to the batches so far, by name.

        Across sources what they gave to the packer, which reads ahead.
        """
        shares = _shares(self._state)
        epochs = [stream.epoch for stream in shares.streams]
        names = [member.name for member in self.members]
        return {n: Given(t, e) for n, t, e in zip(names, shares.given, epochs, strict=True)}

    def __iter__(self) -> Iterator[Batch]:
        state = self._state if self._resumed else self.sequences.start()
        self._state, self._resumed = state, False
        batches = self._batches(state)
        if self.num_workers:
            batches = in_background(batches, self.prefetch_factor)
        for batch, after in batches:
            self._tell_of_ends(after)
            self._state = after
            yield batch

    def _batches(self, state: Packs | Shares) -> Iterator[tuple[Batch, Packs | Shares]]:
        """Batches after `state`, each with the state after it."""
        rows: list[Packed] = []
        after = state
        for packed, after in self.sequences.after(state):
            rows.append(packed)
            if len(rows) == self.batch_size:
                yield self._batch(rows), after
                rows = []
        if rows:
            yield self._batch(rows + [PADDING] * (self.batch_size - len(rows))), after

    def _batch(self, rows: list[Packed]) -> Batch:
        return collate([build_sample(row, self.seq_len, self.mask) for row in rows[self.share]])

    def _tell_of_ends(self, after: Packs | Shares) -> None:
        """Log which sources begin anew, or end, between the present state and `after`."""
        old, new = _shares(self._state), _shares(after)
        for i, member in enumerate(self.members):
            rank = f"data-parallel rank {self.dp_rank}"
            if new.streams[i].epoch > old.streams[i].epoch:
                logger.info(f"{member.name}: {rank} begins epoch {new.streams[i].epoch}")
            if old.owed[i] > new.owed[i] == USED_UP:
                tokens = f"{new.given[i]:,} tokens"
                logger.info(f"{member.name}: used up after {tokens} of {rank}; the others go on")

    # Checkpoints. The values are strings, bytes and integers, which torch.load(weights_only=True)
    # accepts. The key names the data-parallel rank: all ranks that share it save the same.

    def state_dict(self) -> dict[str, Any]:
        waiting = io.BytesIO()
        place = {"source": self.identity, "state": to_json(self._state, waiting)}
        return {
            f"dp_rank_{self.dp_rank}": {"place": json.dumps(place), "tokens": waiting.getvalue()},
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
        if place["source"] != self.identity:
            raise ValueError(
                "dataset: the checkpoint was written while reading other documents (files were "
                "added, removed or changed, another mixture or order of sources, or other "
                f"settings); restore them, {REMEDY}"
            )
        state = from_json(place["state"], io.BytesIO(saved["tokens"]))
        assert isinstance(state, Packs | Shares)
        self._state = self._begun_anew(state)
        self._resumed = True

    def _begun_anew(self, state: Packs | Shares) -> Packs | Shares:
        """Sources that had ended go on where they now repeat."""
        shares = _shares(state)
        owed = [
            0.0 if due == USED_UP and member.repeat else due
            for due, member in zip(shares.owed, self.members, strict=True)
        ]
        shares = shares._replace(owed=tuple(owed))
        return shares if isinstance(state, Shares) else state._replace(documents=shares)


def _shares(state: Any) -> Shares:
    """The part of a loader's state that knows of sources."""
    return state if isinstance(state, Shares) else state.documents


def _tokens_of_parts(parts: Sequence[Any]) -> int:
    return sum(map(len, parts))


def _tokens_of_packed(packed: Packed) -> int:
    return sum(len(piece.tokens) for piece in packed.pieces)


def check_degree(saved: int, current: int) -> None:
    """Raise ValueError if a checkpoint's data was split over another number of ranks."""
    if saved != current:
        raise ValueError(
            f"the checkpoint was saved at data-parallel degree {saved}, this run has {current}: "
            f"the positions in the data belong to {saved} ranks; run at degree {saved} (context-, "
            f"tensor- and pipeline-parallel degrees may change), {REMEDY}"
        )
