"""Kinds of files, by their names, and who reads them."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from recipes.data.mds import read_mds
from recipes.data.records import ANEW, BadDocument, Broken, Record, TextFile, read_json_lines
from recipes.data.tables import read_arrow, read_parquet
from recipes.data.token_files import Vocabulary, read_joined, read_megatron

_PACKED = ("", ".gz", ".zst")
_TEXT = tuple(".txt" + packed for packed in _PACKED)
_LINES = tuple(kind + packed for kind in (".jsonl", ".json") for packed in _PACKED)
_PARQUET = (".parquet",)
_ARROW = (".arrow",)
_MDS = (".mds",)
_IDS = (".npy", ".bin")
SUFFIXES = (*_TEXT, *_LINES, *_PARQUET, *_ARROW, *_MDS, *_IDS)


def read_records(
    path: Path, column: str, skip: int = 0, vocabulary: Vocabulary | None = None
) -> Iterator[Record]:
    """All records of a file after the first `skip` lines, rows or documents, in order.

    From the place on where it cannot be read, a file is one bad document.

    Args:
        path: a file whose name ends in one of SUFFIXES.
        column: JSON key or column that holds the documents; files without columns have none.
        skip: how many lines, rows or documents to pass over, as counted by `Record.number`.
        vocabulary: the tokenizer's, for files of nothing but token ids.
    """
    if path.name.endswith(_TEXT):
        if skip == 0:
            yield TextFile(str(path), 1, path.stat().st_size)
        return
    if path.name.endswith(_PARQUET):
        kind, records = "Parquet", read_parquet(path, column, skip)
    elif path.name.endswith(_ARROW):
        kind, records = "Arrow", read_arrow(path, column, skip)
    elif path.name.endswith(_MDS):
        kind, records = "MDS", read_mds(path, column, skip)
    elif path.name.endswith(_IDS):
        kind, records = "token ids", read_joined(path, skip, vocabulary)
        if has_index(path):
            records = read_megatron(path, skip)
    else:
        kind, records = "JSON Lines", read_json_lines(path, column, skip)
    number = skip
    try:
        for record in records:
            number = record.number
            yield record
        return
    except BadDocument as error:
        broken = error
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        broken = BadDocument(str(path), f"cannot be read as {kind} ({reason})", ANEW)
    yield Broken(str(path), number + 1, path.stat().st_size, broken)


def has_index(path: Path) -> bool:
    """Whether Megatron's index lies beside a file of token ids."""
    return path.suffix == ".bin" and path.with_suffix(".idx").exists()
