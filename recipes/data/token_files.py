"""Files of nothing but token ids as records, mapped into memory.

Joined documents that each end with EOS: `.npy` of numpy, `.bin` of llm.c, and raw ones of nanoGPT
and OLMo, which do not say how wide their ids are. `.bin` with `.idx` of Megatron: documents that
the index tells apart.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recipes.data.content import Content, content_of
from recipes.data.records import ANEW, MAX_BYTES, BadDocument, Record

# Tokens that are searched for EOS at a time.
_CHUNK = 1 << 20
# First number of a header of 256 in llm.c's files: width of the ids after it.
_LLM_C = {20240520: "<u2", 20240801: "<u4"}
_LLM_C_HEADER = 1024
# Magic, version, code of the type, number of sequences, number of document borders.
_INDEX = struct.Struct("<9sQBQQ")
_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class Vocabulary(NamedTuple):
    """What is to be known of the tokenizer to read joined documents."""

    size: int
    eos_id: int | None


@dataclass(frozen=True)
class IdsRecord(Record):
    """Ids of one document, (n,) of any kind of integer: a view of the file."""

    ids: np.ndarray

    unit = "document"

    def _decode(self) -> Content:
        return content_of({"ids": self.ids}, "ids")


def read_joined(path: Path, skip: int, vocabulary: Vocabulary | None) -> Iterator[Record]:
    """The documents of a file after the first `skip`; of an EOS alone there is none."""
    if vocabulary is None or vocabulary.eos_id is None:
        raise BadDocument(
            str(path),
            "documents end with EOS here, and the tokenizer has none",
            "name eos_token in its tokenizer_config.json",
        )
    tokens, start = _open_joined(path, vocabulary)
    for number, (begin, end) in enumerate(_between(tokens, vocabulary.eos_id, path), 1):
        if number > skip and (end - begin > 1 or tokens[begin] != vocabulary.eos_id):
            offset = start + end * tokens.itemsize
            yield IdsRecord(str(path), number, offset, np.asarray(tokens[begin:end]))


def _open_joined(path: Path, vocabulary: Vocabulary) -> tuple[np.ndarray, int]:
    """All tokens of a file, and at which byte they begin."""
    with open(path, "rb") as file:
        head = file.read(_LLM_C_HEADER)
    if head.startswith(b"\x93NUMPY"):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            cause = (
                f"an array {array.shape} of {array.dtype}, one of (tokens,) integers is expected"
            )
            raise BadDocument(str(path), cause, ANEW)
        return array, path.stat().st_size - array.nbytes
    if len(head) == _LLM_C_HEADER:
        magic, _, count = np.frombuffer(head, "<i4")[:3].tolist()
        if magic in _LLM_C:
            shape = (count,)
            return np.memmap(path, _LLM_C[magic], "r", _LLM_C_HEADER, shape), _LLM_C_HEADER
    return _open_raw(path, vocabulary), 0


def _open_raw(path: Path, vocabulary: Vocabulary) -> np.ndarray:
    """Ids without a header are as wide as the vocabulary needs them, if they look like it."""
    kind = np.dtype("<u2" if vocabulary.size <= 1 << 16 else "<u4")
    size = path.stat().st_size
    cause = f"{size} bytes are no whole ids of {kind.itemsize}"
    if size and size % kind.itemsize == 0:
        tokens = np.memmap(path, kind, "r")
        first = tokens[:_CHUNK]
        wider = kind.itemsize == 2 and len(first) > 1 and not first[1::2].any()
        if first.max() < vocabulary.size and not wider:
            return tokens
        found = "every second one is 0" if wider else f"there is {first.max()}"
        cause = f"read as ids of {kind.itemsize} bytes, {found}"
    raise BadDocument(
        str(path),
        f"has no header that says how wide its ids are, and {cause}, which a vocabulary of "
        f"{vocabulary.size} does not have",
        "put the .idx of Megatron beside it, take the tokenizer that made it, or write it with its "
        "type (np.uint16, np.uint32, np.int64): python -c 'import numpy as np; "
        f'np.save("{path.with_suffix("")}-ids.npy", np.memmap("{path}", TYPE))\'',
    )


def _between(tokens: np.ndarray, eos_id: int, path: Path) -> Iterator[tuple[int, int]]:
    """(from, below) of every document, its EOS included."""
    begin = 0
    for start in range(0, len(tokens), _CHUNK):
        chunk = tokens[start : start + _CHUNK]
        for end in (np.flatnonzero(chunk == eos_id) + start + 1).tolist():
            yield begin, end
            begin = end
        if start + len(chunk) - begin > MAX_BYTES:
            cause = f"no EOS (token {eos_id} of the tokenizer) in {MAX_BYTES:,} tokens"
            remedy = "take the tokenizer that made the file, or write a Parquet file of input_ids"
            raise BadDocument(f"{path}, from token {begin + 1} on", cause, remedy)
    if begin < len(tokens):
        yield begin, len(tokens)


def read_megatron(path: Path, skip: int) -> Iterator[Record]:
    """The documents of a .bin file after the first `skip`, by the .idx file beside it."""
    tokens, sizes, starts, borders = _open_megatron(path)
    for number in range(skip + 1, len(borders)):
        sequences = range(int(borders[number - 1]), int(borders[number]))
        parts = [tokens[starts[i] : starts[i] + sizes[i]] for i in sequences]
        ids = np.asarray(parts[0]) if len(parts) == 1 else np.concatenate([tokens[:0], *parts])
        if len(ids):
            offset = int(starts[sequences[-1]] + sizes[sequences[-1]]) * tokens.itemsize
            yield IdsRecord(str(path), number, offset, ids)


def _open_megatron(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(tokens, lengths of the sequences, where they begin, first sequences of the documents)."""
    index = path.with_suffix(".idx")
    raw = np.memmap(index, np.uint8, "r")
    if len(raw) < _INDEX.size or not raw[: len(_INDEX_MAGIC)].tobytes() == _INDEX_MAGIC:
        raise BadDocument(str(index), "no index of Megatron: it begins otherwise", ANEW)
    _, version, code, sequences, borders = _INDEX.unpack(raw[: _INDEX.size].tobytes())
    if version != 1 or code not in _INDEX_TYPES:
        cause = f"version {version}, type of ids {code}; allowed: version 1 and {[*_INDEX_TYPES]}"
        raise BadDocument(str(index), cause, ANEW)
    kind = np.dtype(_INDEX_TYPES[code])
    ends = np.cumsum([_INDEX.size, 4 * sequences, 8 * sequences, 8 * borders]).tolist()
    if len(raw) < ends[-1]:
        raise BadDocument(str(index), f"{len(raw)} bytes, {ends[-1]} are expected", ANEW)
    lengths = raw[ends[0] : ends[1]].view("<i4")
    places = raw[ends[1] : ends[2]].view("<i8")
    documents = raw[ends[2] : ends[3]].view("<i8")
    if borders and (
        documents[0] < 0 or documents[-1] > sequences or (np.diff(documents) < 0).any()
    ):
        raise BadDocument(str(index), "documents of sequences that are not there", ANEW)
    if not sequences:
        return np.empty(0, kind), lengths, places, documents
    expected = int((places + lengths.astype("<i8") * kind.itemsize).max())
    if path.stat().st_size < expected or lengths.min() < 0 or places.min() < 0:
        cause = f"{path.stat().st_size} bytes, {expected} are expected by {index.name}"
        raise BadDocument(str(path), cause, ANEW)
    tokens = np.memmap(path, np.uint8, "r")[: path.stat().st_size // kind.itemsize * kind.itemsize]
    return tokens.view(kind), lengths, places // kind.itemsize, documents
