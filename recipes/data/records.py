"""Files as records: one document each, decoded late and by whoever needs it.

A record carries the raw bytes of a document and says where they stand. `content()` decodes, parses
and checks them, so that the reading loop stays cheap, the costly part runs in a worker (records can
be pickled), and a document that belongs to another rank is never parsed. Whatever is wrong with a
document is found in `content()` and raised as `BadDocument`, naming file, line and remedy.

Here are text files and JSON Lines; `tables` and `token_files` have the others.
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

import numpy as np
import pyarrow as pa

from recipes.data.content import Content, content_of

# Of one document, unpacked: 8 to 16 million tokens. Tokenizers take a hundred times the memory of
# what they read, and a small packed file can be a line without end.
MAX_BYTES = 1 << 25

REMEDY = (
    "correct it, or leave bad documents out: python scripts/prepare_documents.py --skip-bad "
    "writes and counts only the good ones"
)

ANEW = "fetch or write the file anew"

_UNREADABLE = (OSError, EOFError, zlib.error)


class BadDocument(ValueError):
    """A document that cannot be used; the message names file, line (or row), cause and remedy."""

    def __init__(self, place: str, cause: str, remedy: str = REMEDY) -> None:
        super().__init__(f"{place}: {cause}; {remedy}")
        self.place = place
        self.cause = cause
        self.remedy = remedy

    def __reduce__(self) -> tuple:
        # Exceptions are pickled by their message; this one is rebuilt from its parts.
        return type(self), (self.place, self.cause, self.remedy)


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

    def content(self) -> Content:
        """The document. Raises BadDocument if it is empty, too long or cannot be decoded."""
        try:
            content = self._decode()
        except BadDocument:
            raise
        except ValueError as error:
            raise BadDocument(self.place, str(error)) from None
        if isinstance(content, str):
            if len(content) > MAX_BYTES:
                raise too_long(self.place)
            if not content.strip():
                raise BadDocument(self.place, "the document is empty")
        return content

    def text(self) -> str:
        """The document, where only text will do."""
        content = self.content()
        if not isinstance(content, str):
            found = "token ids" if isinstance(content, np.ndarray) else "a conversation"
            raise BadDocument(self.place, f"{found} found, text is expected")
        return content

    @abstractmethod
    def _decode(self) -> Content:
        """The content. A ValueError is what is wrong with it, without the place."""

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
            raise too_long(self.path)
        return self._utf8(raw)


@dataclass(frozen=True)
class JsonLine(Record):
    """One line of a JSON Lines file: an object whose `column` is the document."""

    raw: bytes
    column: str

    def _decode(self) -> Content:
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
            raise missing_column(self.place, self.column, list(value))
        content = content_of(value, self.column)
        if isinstance(content, str):
            try:
                content.encode("utf-8")
            except UnicodeEncodeError:
                cause = f"column {self.column!r} holds half of a surrogate pair, which is no text"
                raise BadDocument(self.place, cause) from None
        return content


@dataclass(frozen=True)
class Row(Record):
    """A row of a prepared folder or a Hugging Face dataset, its document read already."""

    value: Content

    unit = "row"

    def _decode(self) -> Content:
        return self.value


@dataclass(frozen=True)
class Broken(Record):
    """What is left of a file from the place on where it cannot be read: no document at all."""

    error: BadDocument

    def _decode(self) -> Content:
        raise self.error


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


def read_json_lines(path: Path, column: str, skip: int) -> Iterator[Record]:
    """The lines of a file after the first `skip`; `readers.read_records` has the arguments."""
    number = 0
    offset = 0
    try:
        with _open(path) as (file, stored):
            for number, line in enumerate(_lines(file), 1):
                offset = stored.tell() if file is not stored else offset + len(line)
                if number <= skip or line.isspace():
                    continue
                if len(line) > MAX_BYTES:
                    yield Broken(str(path), number, offset, too_long(f"{path}, line {number}"))
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


def too_long(place: str) -> BadDocument:
    """What is wrong with a document of more than MAX_BYTES."""
    return BadDocument(place, f"longer than {MAX_BYTES >> 20} MiB, the limit of one document")


def missing_column(
    place: str, column: str, found: list[str], otherwise: str = f", or {REMEDY}"
) -> BadDocument:
    """What is wrong with a row or a file that has other columns."""
    cause = f"column {column!r} is missing (found: {', '.join(map(str, found)) or 'none'})"
    remedy = "name the column that holds the documents with text_column (--text-column)"
    return BadDocument(place, cause, remedy + otherwise)
