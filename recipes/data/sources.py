"""Where documents come from: files, a prepared folder, or Hugging Face datasets.

A source hands out one pass over the documents of one data-parallel rank, from any position. A
position ("cursor") is a small JSON value, taken after a document; the pass that starts from it
begins with the next one. Document i of a pass belongs to data-parallel rank i mod degree: the ranks
of one context- or tensor-parallel group read the same, others read different documents.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
from datasets.distributed import split_dataset_by_node

from recipes.data.content import Content
from recipes.data.files import digest, files_identity, find_files
from recipes.data.readers import read_records
from recipes.data.records import BadDocument, Record, Row
from recipes.data.shards import MANIFEST, ShardFolder
from recipes.data.token_files import Vocabulary
from recipes.titan import logger

Cursor = dict[str, Any]


class Source(Protocol):
    """identity: tells whether a saved cursor still means the same place."""

    identity: str

    def documents(
        self, epoch: int, cursor: Cursor | None, rank: int, degree: int
    ) -> Iterator[tuple[Cursor, Record]]:
        """One rank's documents after `cursor` (None: from the start), each with its own cursor."""


class FileSource:
    """Files of the kinds that `readers` knows, read in the order of their names."""

    def __init__(
        self, paths: str | Sequence[str], column: str, vocabulary: Vocabulary | None = None
    ) -> None:
        found = find_files(paths)
        if found.left_out:
            logger.info(f"{paths}: {found.told()}")
        self.files = found.files
        self.column = column
        self.vocabulary = vocabulary
        self.identity = files_identity(self.files, column)

    def documents(
        self, epoch: int, cursor: Cursor | None, rank: int, degree: int
    ) -> Iterator[tuple[Cursor, Record]]:
        cursor = cursor or {"file": 0, "record": 0, "document": 0}
        document = cursor["document"]
        for index in range(cursor["file"], len(self.files)):
            skip = cursor["record"] if index == cursor["file"] else 0
            for record in read_records(self.files[index], self.column, skip, self.vocabulary):
                document += 1
                if (document - 1) % degree == rank:
                    yield {"file": index, "record": record.number, "document": document}, record


class PreparedSource:
    """A folder written by scripts/prepare_documents.py.

    Args:
        shuffle_seed: None keeps the order of the files; else every epoch has an order of its own.

    Raises:
        ValueError: the folder is unfinished or damaged, or was prepared with another tokenizer.

    Attributes:
        loss_on: which messages of its conversations are learned; None if it has none.
    """

    def __init__(self, folder: Path, tokenizer_identity: str, shuffle_seed: int | None) -> None:
        self.shards = ShardFolder(folder)
        manifest = self.shards.manifest
        if manifest["tokenizer"]["sha256"] != tokenizer_identity:
            raise ValueError(
                f"{folder} was prepared with the tokenizer "
                f"{manifest['tokenizer']['path']} ({manifest['tokenizer']['sha256'][:12]}), and "
                f"model.hf_assets_path holds another one ({tokenizer_identity[:12]}); prepare the "
                "documents with the model's tokenizer"
            )
        self.loss_on: str | None = manifest.get("loss_on")
        self.shuffle_seed = shuffle_seed
        self.identity = digest([manifest["shards"], shuffle_seed])

    def check_learned(self, wanted: str) -> None:
        """Raise ValueError if the conversations were prepared for another loss, or for none."""
        if self.loss_on not in (None, wanted):
            raise ValueError(
                f'documents.loss_on = "{wanted}": {self.shards.folder} was prepared with --loss-on '
                f'{self.loss_on}; allowed: "{self.loss_on}", or prepare the conversations anew'
            )
        if not any(shard.get("learned", 1) for shard in self.shards.manifest["shards"]):
            raise ValueError(
                f"{self.shards.folder / MANIFEST}: no token of its documents is learned; prepare "
                "them with another --loss-on, or from ids with other labels or loss_mask"
            )

    def documents(
        self, epoch: int, cursor: Cursor | None, rank: int, degree: int
    ) -> Iterator[tuple[Cursor, Record]]:
        order = np.arange(len(self.shards))
        if self.shuffle_seed is not None:
            order = np.random.default_rng([self.shuffle_seed, epoch]).permutation(order)
        for index in range(cursor["document"] if cursor else rank, len(order), degree):
            yield {"document": index + degree}, self.shards[int(order[index])]


@dataclass
class HubSource:
    """A dataset opened by `datasets`, streaming or not.

    Documents without text are left out, since nobody can correct them on the hub; the first one of
    a pass is logged.

    Args:
        name: for messages.
        identity: what was opened.
        dataset: a `datasets.Dataset` or `IterableDataset`.
        read: takes the document from a row; a KeyError means that the column is missing, another
            ValueError says what is wrong with it.
    """

    name: str
    identity: str
    dataset: Any
    read: Callable[[dict[str, Any]], Content]

    def documents(
        self, epoch: int, cursor: Cursor | None, rank: int, degree: int
    ) -> Iterator[tuple[Cursor, Record]]:
        done = cursor["row"] if cursor else 0
        if streaming := isinstance(self.dataset, datasets.IterableDataset):
            # A new object for each pass: one moved to a saved place begins there ever after.
            part = split_dataset_by_node(self.dataset, rank, degree)
            part.set_epoch(epoch)
            if cursor:
                part.load_state_dict(cursor["state"])
            rows = part
        else:
            part = split_dataset_by_node(self.dataset, rank, degree)
            rows = part.skip(min(done, len(part)))
        warned = False
        for number, row in enumerate(rows, done + 1):
            content = self._content(row, number)
            if not isinstance(content, str) or (content and not content.isspace()):
                after: Cursor = {"row": number}
                if streaming:
                    after["state"] = part.state_dict()
                yield after, Row(self.name, number, 0, content)
            elif not warned:
                logger.warning(f"{self.name}, row {number}: no text; such rows are left out")
                warned = True

    def _content(self, row: dict[str, Any], number: int) -> Content:
        try:
            return self.read(row)
        except KeyError as error:
            cause = f"column {error} is missing (found: {', '.join(row)})"
        except ValueError as error:
            cause = str(error)
        remedy = "name the column that holds the documents with text_column"
        raise BadDocument(f"{self.name}, row {number}", cause, remedy)
