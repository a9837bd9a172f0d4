"""Shards of MosaicML's streaming (MDS), uncompressed, as records: a document a sample.

A shard describes itself: number of samples (uint32), where each begins and the last ends (uint32),
a JSON object with names, encodings and sizes of the columns, then the samples: sizes of the columns
without a fixed one (uint32), then the values. Read here without the library, which wants a
transformers older than this project's.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.content import BESIDE_IDS, BESIDE_MESSAGES, Content, content_of
from recipes.data.records import ANEW, BadDocument, Record, missing_column

# Codes of the kinds of numbers in arrays whose encoding names none.
_KINDS = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}

# (name, encoding, bytes of a value or None) of every column.
_Columns = tuple[tuple[str, str, int | None], ...]


@dataclass(frozen=True)
class Sample(Record):
    """One sample, as stored."""

    raw: bytes
    columns: _Columns
    column: str

    unit = "sample"

    def _decode(self) -> Content:
        wanted = {self.column, *BESIDE_IDS, *BESIDE_MESSAGES}
        free = [name for name, _, size in self.columns if size is None]
        place = 4 * len(free)
        sizes = dict(zip(free, np.frombuffer(self.raw[:place], "<u4").tolist(), strict=True))
        row = {}
        for name, encoding, size in self.columns:
            end = place + (sizes[name] if size is None else size)
            if name in wanted:
                try:
                    row[name] = _decode_value(name, encoding, self.raw[place:end])
                except (IndexError, KeyError, TypeError) as error:
                    raise ValueError(f"column {name!r} is no {encoding} ({error!r})") from None
            place = end
        if place != len(self.raw):
            raise ValueError(f"{len(self.raw)} bytes, its columns have {place}")
        return content_of(row, self.column)


def read_mds(path: Path, column: str, skip: int) -> Iterator[Record]:
    """The samples of a shard after the first `skip`."""
    raw = np.memmap(path, np.uint8, "r")
    (count,) = raw[:4].view("<u4").tolist()
    ends = raw[4 : 8 + 4 * count].view("<u4").tolist()
    if len(ends) != count + 1 or ends[-1] != len(raw):
        cause = f"{len(raw)} bytes are no whole shard of {count} samples"
        raise BadDocument(str(path), cause, ANEW)
    about = json.loads(raw[8 + 4 * count : ends[0]].tobytes())
    keys = ("column_names", "column_encodings", "column_sizes")
    columns = tuple(zip(*(about[key] for key in keys), strict=True))
    names = [name for name, _, _ in columns]
    if column not in names:
        raise missing_column(str(path), column, names, "")
    for number in range(skip + 1, count + 1):
        sample = raw[ends[number - 1] : ends[number]].tobytes()
        yield Sample(str(path), number, ends[number], sample, columns, column)


def _decode_value(name: str, encoding: str, raw: bytes) -> Any:
    kind, *details = encoding.split(":")
    if kind == "str":
        return raw.decode("utf-8")
    if kind == "json":
        return json.loads(raw)
    if kind != "ndarray":
        raise ValueError(
            f"column {name!r} is {encoding}, which does not say what it is; str, json or ndarray "
            "are expected"
        )
    if details:
        dtype = np.dtype(details[0])
    else:
        dtype, raw = np.dtype(_KINDS[raw[0]]), raw[1:]
    if len(details) < 2:
        # One byte for the number of dimensions and the width of their sizes, then these.
        dimensions, width = raw[0] >> 2, 1 << (raw[0] & 3)
        raw = raw[1 + dimensions * width :]
    else:
        dimensions = len(details[1].split(","))
    if dimensions != 1:
        raise ValueError(f"column {name!r} is an array of {dimensions} dimensions, 1 is expected")
    return np.frombuffer(raw, dtype)
