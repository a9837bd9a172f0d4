"""Tokenized documents on disk: memory-mapped Arrow files and a manifest.

A folder holds shard-00000.arrow, shard-00001.arrow, ... (Arrow IPC files, one column "tokens" of
int32 lists, a row per document) and manifest.json, which is written last: a folder with a manifest
is whole. A file gets its name only when its bytes are on disk.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recipes.data.records import Row

FORMAT = "striped-cp tokenized documents"
VERSION = 1
MANIFEST = "manifest.json"
PROGRESS = "progress.json"
TEMPORARY = ".tmp"

_SCHEMA = pa.schema([("tokens", pa.list_(pa.int32()))])
# A record batch holds about so many tokens; list offsets are 32 bit.
_BATCH_TOKENS = 1 << 24


def write_shard(path: Path, documents: Sequence[np.ndarray]) -> None:
    """Write documents, each (n,) int32, to an Arrow file that appears whole or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    with open(temporary, "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for batch in _batches(documents):
            offsets = np.cumsum([0, *map(len, batch)], dtype=np.int32)
            values = pa.array(np.concatenate(batch))
            lists = pa.ListArray.from_arrays(pa.array(offsets), values)
            writer.write_batch(pa.record_batch([lists], schema=_SCHEMA))
    _publish(temporary, path)


def _batches(documents: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    batch: list[np.ndarray] = []
    tokens = 0
    for document in documents:
        batch.append(document)
        tokens += len(document)
        if tokens >= _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file that appears whole or not at all."""
    temporary = path.with_name(path.name + TEMPORARY)
    temporary.write_text(json.dumps(value, indent=1) + "\n")
    _publish(temporary, path)


def read_json(path: Path) -> dict[str, Any]:
    """Read what `write_json` wrote."""
    try:
        value = json.loads(path.read_text())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: not written by scripts/prepare_documents.py")
    return value


def _publish(temporary: Path, path: Path) -> None:
    """Give a finished file its name, with content and name both on disk afterwards."""
    _fsync(temporary)
    os.replace(temporary, path)
    _fsync(path.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ShardFolder:
    """A folder that prepare_documents.py wrote: documents by number, read through memory maps.

    Raises:
        ValueError: the folder is unfinished, of another version, or a shard is not as written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        names = [shard["file"] for shard in self.manifest["shards"]]
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{folder / MANIFEST}: names {name}, outside of its folder")
        self.files = [folder / name for name in names]
        self._lists: list[pa.ListArray] = []
        self._places: list[tuple[str, int]] = []  # file of each, and its first row
        remedy = "copy the folder anew or run scripts/prepare_documents.py --overwrite"
        for path, shard in zip(self.files, self.manifest["shards"], strict=True):
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise ValueError(
                    f"{path}: missing, or not {shard['bytes']} bytes long as {MANIFEST} says; "
                    f"{remedy}"
                )
            try:
                with pa.memory_map(str(path)) as source:
                    table = pa.ipc.open_file(source).read_all()
            except (OSError, pa.ArrowException) as error:
                raise ValueError(f"{path}: cannot be read ({error}); {remedy}") from None
            row = 0
            for lists in table["tokens"].chunks:
                self._lists.append(lists)
                self._places.append((str(path), row))
                row += len(lists)
        self._ends = np.cumsum([len(lists) for lists in self._lists], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> Row:
        """A document, (n,) int32: a view of the memory map, nothing is copied."""
        chunk = int(np.searchsorted(self._ends, number, side="right"))
        row = number - (int(self._ends[chunk - 1]) if chunk else 0)
        path, first = self._places[chunk]
        return Row(path, first + row + 1, 0, self._lists[chunk][row].values.to_numpy())

    def lengths(self) -> np.ndarray:
        """Tokens of every document: (documents,) int64."""
        parts = [np.diff(lists.offsets.to_numpy()) for lists in self._lists]
        return np.concatenate(parts).astype(np.int64)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a finished folder."""
    path = folder / MANIFEST
    if not path.exists():
        raise ValueError(
            f"{folder}: its preparation did not finish ({PROGRESS} without {MANIFEST}); run the "
            "same scripts/prepare_documents.py command again, it goes on where it stopped"
        )
    manifest = read_json(path)
    found = manifest.get("format"), manifest.get("version")
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"{path}: format {found[0]!r} version {found[1]}, this code reads {FORMAT!r} version "
            f"{VERSION}; prepare the documents anew"
        )
    return manifest


def is_shard_folder(path: str | Sequence[str]) -> bool:
    """Whether a path is one folder that prepare_documents.py has at least begun to write."""
    if not isinstance(path, str):
        return False
    return any(Path(path, name).exists() for name in (MANIFEST, PROGRESS))
