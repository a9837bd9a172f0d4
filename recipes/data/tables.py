"""Parquet and Arrow files as records: a document a row."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipes.data.content import (
    BESIDE_IDS,
    BESIDE_MESSAGES,
    EXPECTED,
    MESSAGES,
    Content,
    content_of,
    without_none,
)
from recipes.data.records import BadDocument, Broken, Record, missing_column

# Rows of a Parquet file held decoded at a time; a row may be a whole book.
_ROWS = 16

# (rows before it, rows, bytes of the file read to their end)
_Piece = tuple[int, pa.RecordBatch, int]


@dataclass(frozen=True)
class TextRow(Record):
    """One row whose column is text; `raw` is None for null."""

    raw: bytes | None

    unit = "row"

    def _decode(self) -> Content:
        return "" if self.raw is None else self._utf8(self.raw)


@dataclass(frozen=True)
class TableRow(Record):
    """One row of which more than a text is read; lists of integers are arrays already."""

    values: dict[str, Any]
    column: str

    unit = "row"

    def _decode(self) -> Content:
        return content_of(self.values, self.column)


def read_parquet(path: Path, column: str, skip: int) -> Iterator[Record]:
    """The rows of a Parquet file after the first `skip`."""
    return _read(path, column, skip, _parquet_pieces(path, column, skip))


def read_arrow(path: Path, column: str, skip: int) -> Iterator[Record]:
    """The rows of an Arrow IPC file or stream after the first `skip`, mapped into memory."""
    return _read(path, column, skip, _arrow_pieces(path, column))


def _parquet_pieces(path: Path, column: str, skip: int) -> Iterator[_Piece]:
    size = path.stat().st_size
    with pq.ParquetFile(path, memory_map=True) as file:
        names = _columns(path, file.schema_arrow, column)
        row = 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= skip:
                row += rows
                continue
            for batch in file.iter_batches(_ROWS, [group], names):
                end = row + len(batch)
                yield row, batch, size * end // file.metadata.num_rows
                row = end


def _arrow_pieces(path: Path, column: str) -> Iterator[_Piece]:
    size = path.stat().st_size
    with pa.memory_map(str(path)) as source:
        batches: Iterable[pa.RecordBatch]
        try:
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
        except pa.ArrowInvalid:  # a stream, as `datasets` writes them
            source.seek(0)
            batches = file = pa.ipc.open_stream(source)
        names = _columns(path, file.schema, column)
        row = 0
        for batch in batches:
            yield row, batch.select(names), min(source.tell(), size)
            row += len(batch)


def _columns(path: Path, schema: pa.Schema, column: str) -> list[str]:
    """The columns to read. Raises BadDocument if the file has no such documents."""
    if column not in schema.names:
        raise missing_column(str(path), column, schema.names, "")
    kind = schema.field(column).type
    beside: tuple[str, ...]
    if _is_text(kind):
        beside = BESIDE_MESSAGES if column == "prompt" and "completion" in schema.names else ()
    elif _is_list(kind) and pa.types.is_integer(kind.value_type):
        beside = BESIDE_IDS
    elif _is_list(kind) and pa.types.is_struct(kind.value_type):
        beside = BESIDE_MESSAGES
    else:
        raise BadDocument(str(path), f"column {column!r} is {kind}, {EXPECTED}")
    return [column, *(name for name in beside if name in schema.names)]


def _read(path: Path, column: str, skip: int, pieces: Iterator[_Piece]) -> Iterator[Record]:
    for first, batch, offset in pieces:
        for index in range(max(0, skip - first), len(batch)):
            yield _record(str(path), first + index + 1, offset, batch, index, column)


def _record(
    path: str, row: int, offset: int, batch: pa.RecordBatch, index: int, column: str
) -> Record:
    if batch.num_columns == 1 and column != MESSAGES and _is_text(batch.schema.field(0).type):
        value = batch.column(0)[index]
        raw = value.as_buffer().to_pybytes() if value.is_valid else None
        return TextRow(path, row, offset, raw)
    try:
        values = {name: _value(batch.column(name)[index]) for name in batch.schema.names}
    except UnicodeDecodeError as error:
        return Broken(path, row, offset, BadDocument(f"{path}, row {row}", f"not UTF-8 ({error})"))
    return TableRow(path, row, offset, values, column)


def _value(scalar: pa.Scalar) -> Any:
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if _is_list(kind) and not pa.types.is_nested(kind.value_type):
        return scalar.values.to_numpy(zero_copy_only=False)
    return without_none(scalar.as_py())


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _is_list(kind: pa.DataType) -> bool:
    return (
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )
