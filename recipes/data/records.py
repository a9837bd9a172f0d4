"""Text files as records: one document each, decoded late and by whoever needs it.

A record carries the raw bytes of a document and says where they stand. `text()` decodes, parses and
checks them, so that the reading loop stays cheap, the costly part runs in a worker (records can be
pickled), and a document that belongs to another rank is never parsed. Whatever is wrong with a
document is found in `text()` and raised as `BadDocument`, naming file, line and remedy.
"""

import contextlib
import gzip
import io
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import pyarrow as pa
import pyarrow.parquet as pq

_LINES = (".jsonl", ".json")
_TEXT = (".txt",)
_PACKED = (".gz", ".zst")
SUFFIXES = (
    *(kind + packed for kind in (*_TEXT, *_LINES) for packed in ("", *_PACKED)),
    ".parquet",
)
# Of one document, unpacked: 8 to 16 million tokens. Tokenizers take a hundred times the memory of
# what they read, and a small packed file can be a line without end.
MAX_BYTES = 1 << 25

REMEDY = (
    "correct it, or leave bad documents out: python scripts/prepare_documents.py --skip-bad "
    "writes and counts only the good ones"
)

_UNREADABLE = (OSError, EOFError, zlib.error)
# Rows of a Parquet file held decoded at a time; a row may be a whole book.
_PARQUET_ROWS = 16


class BadDocument(ValueError):
    """A document that cannot be used; the message names file, line (or row), cause and remedy."""

    def __init__(self, place: str, cause: str, remedy: str = REMEDY) -> None:
        super().__init__(f"{place}: {cause}; {remedy}")
        self.place = place
        self.cause = cause

    def __reduce__(self) -> tuple:
        # Exceptions are pickled by their message; this one is rebuilt from its parts.
        return type(self), (self.place, self.cause)


@dataclass(frozen=True)
class Record(ABC):
    """One document of a file.

    Attributes:
        path: the file.
        number: of the line or row, from 1; a text file is one document, number 1.
        offset: bytes of the file, as stored, that were read up to here (about; for progress).
    """

    path: str
    number: int
    offset: int

    unit = "line"

    @property
    def place(self) -> str:
        return f"{self.path}, {self.unit} {self.number}"

    def text(self) -> str:
        """The document. Raises BadDocument if it is empty, too long or cannot be decoded."""
        text = self._decode()
        if len(text) > MAX_BYTES:
            raise _too_long(self.place)
        if not text.strip():
            raise BadDocument(self.place, "the document is empty")
        return text

    @abstractmethod
    def _decode(self) -> str: ...

    def _utf8(self, raw: bytes) -> str:
        try:
            return raw.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start)
            place = f"{self.path}, line {line + 1}" if self.unit == "file" else self.place
            cause = f"not UTF-8 (byte 0x{raw[error.start]:02x} at offset {error.start})"
            raise BadDocument(place, cause) from None


@dataclass(frozen=True)
class TextFile(Record):
    """A .txt file is one document. Read late: the record itself stays small."""

    unit = "file"

    @property
    def place(self) -> str:
        return self.path

    def _decode(self) -> str:
        try:
            with _open(Path(self.path)) as (file, _):
                raw = file.read(MAX_BYTES + 1)
        except _UNREADABLE as error:
            raise BadDocument(self.path, f"cannot be read ({error})") from None
        if len(raw) > MAX_BYTES:
            raise _too_long(self.path)
        return self._utf8(raw)


@dataclass(frozen=True)
class JsonLine(Record):
    """One line of a JSON Lines file: an object whose `column` is the document."""

    raw: bytes
    column: str

    def _decode(self) -> str:
        line = self._utf8(self.raw)
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            cause = f"not JSON ({error.msg}, column {error.colno})"
            raise BadDocument(self.place, cause) from None
        except (ValueError, RecursionError) as error:
            # Numbers of thousands of digits, thousands of brackets: the parser's own limits.
            raise BadDocument(self.place, f"not JSON that can be read ({error})") from None
        if not isinstance(value, dict):
            raise BadDocument(
                self.place, f"a JSON object is expected, found {type(value).__name__}"
            )
        if self.column not in value:
            raise _missing_column(self.place, self.column, list(value))
        text = value[self.column]
        if not isinstance(text, str):
            cause = f"column {self.column!r} is {type(text).__name__}, text is expected"
            raise BadDocument(self.place, cause)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            cause = f"column {self.column!r} holds half of a surrogate pair, which is no text"
            raise BadDocument(self.place, cause) from None
        return text


@dataclass(frozen=True)
class ParquetRow(Record):
    """One row of a Parquet file; `raw` is None for null."""

    raw: bytes | None

    unit = "row"

    def _decode(self) -> str:
        return "" if self.raw is None else self._utf8(self.raw)


@dataclass(frozen=True)
class Broken(Record):
    """What is left of a file from the place on where it cannot be read: no document at all."""

    error: BadDocument

    def _decode(self) -> str:
        raise self.error


def read_records(path: Path, column: str, skip: int = 0) -> Iterator[Record]:
    """All records of a file after the first `skip` lines, rows or documents, in order.

    Args:
        path: a file whose name ends in one of SUFFIXES.
        column: JSON key or Parquet column that holds the text; text files have none.
        skip: how many lines, rows or documents to pass over, as counted by `Record.number`.
    """
    if path.name.endswith(tuple(s for s in SUFFIXES if s.startswith(_TEXT))):
        if skip == 0:
            yield TextFile(str(path), 1, path.stat().st_size)
    elif path.name.endswith(".parquet"):
        yield from _parquet_rows(path, column, skip)
    else:
        yield from _json_lines(path, column, skip)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file to read from, unpacked, and the file as stored, whose position tells the progress."""
    with open(path, "rb") as stored:
        if path.suffix == ".gz":
            yield cast(IO[bytes], gzip.GzipFile(fileobj=stored)), stored
        elif path.suffix == ".zst":
            unpacked = pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd")
            yield io.BufferedReader(unpacked), stored
        else:
            yield stored, stored


def _json_lines(path: Path, column: str, skip: int) -> Iterator[Record]:
    number = 0
    offset = 0
    try:
        with _open(path) as (file, stored):
            for number, line in enumerate(_lines(file), 1):
                offset = stored.tell() if file is not stored else offset + len(line)
                if number <= skip or line.isspace():
                    continue
                if len(line) > MAX_BYTES:
                    yield Broken(str(path), number, offset, _too_long(f"{path}, line {number}"))
                else:
                    yield JsonLine(str(path), number, offset, line, column)
    except _UNREADABLE as error:
        cause = f"cannot be read on ({error})"
        remedy = (
            "fetch the file anew (gzip -t or zstd -t tells whether a copy is whole), or keep what "
            f"stands before line {number + 1}: python scripts/prepare_documents.py --skip-bad"
        )
        broken = BadDocument(f"{path}, line {number + 1}", cause, remedy)
        yield Broken(str(path), number + 1, offset, broken)


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Lines of a file; of one that is too long its beginning, longer than MAX_BYTES too."""
    while line := file.readline(MAX_BYTES + 2):
        rest = line
        while len(rest) > MAX_BYTES and not rest.endswith(b"\n"):
            rest = file.readline(MAX_BYTES + 2)
        yield line


def _parquet_rows(path: Path, column: str, skip: int) -> Iterator[Record]:
    row = 0
    size = path.stat().st_size
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            if column not in file.schema_arrow.names:
                raise _missing_column(str(path), column, file.schema_arrow.names, "")
            kind = file.schema_arrow.field(column).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise BadDocument(str(path), f"column {column!r} is {kind}, text is expected")
            groups = range(file.num_row_groups)
            rows = file.metadata.num_rows
            while groups and row + file.metadata.row_group(groups[0]).num_rows <= skip:
                row += file.metadata.row_group(groups[0]).num_rows
                groups = groups[1:]
            for batch in file.iter_batches(_PARQUET_ROWS, list(groups), [column]):
                for value in batch.column(0):
                    row += 1
                    if row > skip:
                        raw = value.as_buffer().to_pybytes() if value.is_valid else None
                        yield ParquetRow(str(path), row, size * row // rows, raw)
    except BadDocument as error:
        yield Broken(str(path), row + 1, size, error)
    except (OSError, pa.ArrowException) as error:
        cause = f"cannot be read as Parquet ({str(error).splitlines()[0]})"
        remedy = "fetch or write the file anew"
        yield Broken(str(path), row + 1, size, BadDocument(str(path), cause, remedy))


def _too_long(place: str) -> BadDocument:
    return BadDocument(place, f"longer than {MAX_BYTES >> 20} MiB, the limit of one document")


def _missing_column(
    place: str, column: str, found: list[str], otherwise: str = f", or {REMEDY}"
) -> BadDocument:
    cause = f"column {column!r} is missing (found: {', '.join(map(str, found)) or 'none'})"
    remedy = "name the column that holds the text with text_column (--text-column)"
    return BadDocument(place, cause, remedy + otherwise)
