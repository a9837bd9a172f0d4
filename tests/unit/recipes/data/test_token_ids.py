"""Token ids from elsewhere: read back equal, with their masks, or refused by file and line."""

import json
import logging
import re
import struct
import tracemalloc

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from recipes.data.dataset import build_dataloader
from recipes.data.files import find_files
from recipes.data.loader import DocumentLoader
from recipes.data.readers import read_records
from recipes.data.records import BadDocument
from recipes.data.sources import FileSource
from recipes.data.streams import Member
from recipes.data.token_files import Vocabulary
from recipes.evaluation.haystack import Encoder, Haystack
from recipes.preflight import load_config
from tests.helpers.documents import (
    NumberTokenizer,
    fingerprint,
    job,
    number_documents,
    write_jsonl,
    write_prepared,
)

EOS = 2
VOCABULARY = Vocabulary(size=100_000, eos_id=EOS)
SMALL = Vocabulary(size=2048, eos_id=EOS)
LENGTHS = [30, 5, 12, 90, 7, 41, 3]


def documents():
    """Documents of ids, each with EOS at its end and nowhere else."""
    dice = np.random.default_rng(1)
    return [[*dice.integers(3, 2000, n - 1).tolist(), EOS] for n in LENGTHS]


def read(path, column="input_ids", skip=0, vocabulary=VOCABULARY):
    records = read_records(path, column, skip, vocabulary)
    return [(record.number, record.content().tolist()) for record in records]


def fault(path, vocabulary=VOCABULARY):
    *good, bad = read_records(path, "input_ids", 0, vocabulary)
    assert [record.content() is not None for record in good] == [True] * len(good)
    with pytest.raises(BadDocument) as info:
        bad.content()
    return str(info.value)


# Tables and lines: a row a document.


def write_lines(path, table):
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def write_ipc(path, table):
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def write_stream(path, table):
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


ROWS = {
    "a.jsonl": write_lines,
    "a.parquet": lambda path, table: pq.write_table(table, path, row_group_size=3),
    "file.arrow": write_ipc,
    "stream.arrow": write_stream,
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("kind", [pa.int32(), pa.int64(), pa.uint16()])
def test_rows_of_ids_from_any_place_on(tmp_path, name, kind):
    path = tmp_path / name
    ROWS[name](path, pa.table({"input_ids": pa.array(documents(), pa.list_(kind)), "n": LENGTHS}))
    expected = list(enumerate(documents(), 1))
    for skip in (0, 1, 3, 5, 7):
        assert read(path, skip=skip) == expected[skip:]
    for record in read_records(path, "input_ids"):
        assert record.content().dtype == np.int32


def test_a_saved_dataset_is_a_folder(tmp_path):
    saved = datasets.Dataset.from_dict({"input_ids": documents()})
    saved.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    found = find_files(str(tmp_path / "saved"))
    assert [path.suffix for path in found.files] == [".arrow"] * 2
    assert [ids for path in found.files for _, ids in read(path)] == documents()


MASKED = {
    # What is not learned is the complement of its id.
    "labels": ([3, 4, 5, 2], {"labels": [-100, 4, -100, 2]}, [~3, 4, ~5, 2]),
    "loss_mask": ([3, 4, 5, 2], {"loss_mask": [0, 1, 1, 1]}, [~3, 4, 5, 2]),
    "both": ([3, 4, 2], {"labels": [3, 4, -100], "loss_mask": [0, 1, 1]}, [~3, 4, ~2]),
    "attention": ([3, 4, 2], {"attention_mask": [1, 1, 1]}, [3, 4, 2]),
    "padded left": ([0, 0, 3, 2], {"attention_mask": [0, 0, 1, 1]}, [3, 2]),
    "padded right": (
        [3, 4, 2, 2],
        {"attention_mask": [1, 1, 1, 0], "labels": [-100, 4, 2, -100]},
        [~3, 4, 2],
    ),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("case", MASKED)
def test_masks_beside_the_ids_are_used(tmp_path, name, case):
    ids, beside, expected = MASKED[case]
    columns = {"input_ids": [ids], **{key: [values] for key, values in beside.items()}}
    ROWS[name](tmp_path / name, pa.table(columns))
    assert read(tmp_path / name) == [(1, expected)]


def test_masks_may_be_booleans_and_missing_in_some_rows(tmp_path):
    table = pa.table({"input_ids": [[3, 4], [5, 6]], "loss_mask": [[False, True], None]})
    pq.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [(1, [~3, 4]), (2, [5, 6])]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"input_ids": []}, "column 'input_ids' is empty"),
        ({"input_ids": [3, -1]}, "column 'input_ids' has -1, which is no token id"),
        ({"input_ids": [3, 1 << 40]}, f"column 'input_ids' has {1 << 40}, which is no token id"),
        ({"input_ids": [3, 4], "labels": [3]}, "column 'labels' has 1 values for 2 token ids"),
        (
            {"input_ids": [3, 4, 2], "labels": [4, 2, -100]},
            "column 'labels' differs from the token ids at token 1: labels are expected unshifted",
        ),
        (
            {"input_ids": [3, 4, 2], "loss_mask": [0, 2, 1]},
            "column 'loss_mask' has other values than 0 and 1",
        ),
        (
            {"input_ids": [3, 4, 2], "attention_mask": [1, 0, 1]},
            "column 'attention_mask' has zeros between ones",
        ),
        ({"input_ids": [3], "attention_mask": [0]}, "column 'attention_mask' leaves no token"),
    ],
)
def test_a_bad_row_is_named(tmp_path, name, row, cause):
    good = {key: [2] if key == "input_ids" else [1] for key in row}
    if "labels" in row:
        good["labels"] = [-100]
    types = pa.schema({key: pa.list_(pa.int64()) for key in row})
    ROWS[name](tmp_path / name, pa.Table.from_pylist([good, row], schema=types))
    unit = "line" if name == "a.jsonl" else "row"
    assert fault(tmp_path / name).startswith(f"{tmp_path / name}, {unit} 2: {cause}")


@pytest.mark.parametrize("ids", [[3.5, 4], ["3"], [[3], [4, 5]], [3, None], 7, {"a": 3}])
def test_lines_of_other_things_are_named(tmp_path, ids):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": ids}) + "\n")
    assert fault(path).startswith(f"{path}, line 1: column 'input_ids' is ")


def test_columns_of_other_types_are_named(tmp_path):
    for column in ([[1.5]], [1], [{"a": 1}]):
        pq.write_table(pa.table({"input_ids": column}), tmp_path / "a.parquet")
        assert "text, a list of token ids or a list of messages" in fault(tmp_path / "a.parquet")
    write_ipc(tmp_path / "a.arrow", pa.table({"ids": [[1]]}))
    assert "column 'input_ids' is missing (found: ids)" in fault(tmp_path / "a.arrow")
    (tmp_path / "a.arrow").write_bytes(b"no Arrow at all")
    assert fault(tmp_path / "a.arrow").startswith(f"{tmp_path}/a.arrow: cannot be read as Arrow")


# Joined documents.


def joined(kind):
    return np.concatenate([np.array(ids, kind) for ids in documents()])


def write_llm_c(path, tokens):
    """As llm.c's dev/data/data_common.py writes them."""
    magic, version = (20240520, 1) if tokens.dtype == np.uint16 else (20240801, 7)
    header = np.zeros(256, np.int32)
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


JOINED = {
    "a.npy": np.save,
    "a.bin": lambda path, tokens: tokens.tofile(path),  # nanoGPT
    "raw.npy": lambda path, tokens: tokens.tofile(path),  # OLMo
    "llm-c.bin": write_llm_c,
}


@pytest.mark.parametrize("name", JOINED)
@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_joined_documents_are_cut_after_their_eos(tmp_path, name, kind):
    path = tmp_path / name
    JOINED[name](path, joined(kind))
    vocabulary = VOCABULARY if kind is np.uint32 else SMALL
    expected = list(enumerate(documents(), 1))
    for skip in (0, 1, 6, 7):
        assert read(path, skip=skip, vocabulary=vocabulary) == expected[skip:]


def test_eos_may_stand_before_every_document_and_miss_at_the_end(tmp_path):
    np.save(tmp_path / "a.npy", np.array([EOS, 3, 4, EOS, EOS, 5], np.uint16))
    assert read(tmp_path / "a.npy") == [(2, [3, 4, EOS]), (4, [5])]


def test_documents_over_the_borders_of_what_is_searched_at_a_time(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", joined(np.uint16))
    for chunk in (1, 4, 30, 31):
        monkeypatch.setattr("recipes.data.token_files._CHUNK", chunk)
        assert [ids for _, ids in read(tmp_path / "a.npy")] == documents()


def test_joined_documents_that_cannot_be_told_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    joined(np.uint32).tofile(path)
    message = fault(path, SMALL)
    assert message.startswith(f"{path}: has no header that says how wide its ids are, and read as")
    assert "every second one is 0" in message
    (advice,) = re.findall(r"python -c '(.*)'$", message)
    exec(advice.replace("TYPE", "np.uint32"))
    assert [ids for _, ids in read(tmp_path / "a-ids.npy", vocabulary=SMALL)] == documents()
    joined(np.uint16).tofile(path)
    assert "read as ids of 4 bytes, there is" in fault(path)
    path.write_bytes(b"abc")
    assert "3 bytes are no whole ids of 2" in fault(path, SMALL)
    path.write_bytes(b"")
    assert "0 bytes are no whole ids" in fault(path)
    np.save(tmp_path / "a.npy", joined(np.uint16))
    assert "documents end with EOS here" in fault(tmp_path / "a.npy", Vocabulary(2048, None))
    assert "documents end with EOS here" in fault(tmp_path / "a.npy", None)
    monkeypatch.setattr("recipes.data.token_files.MAX_BYTES", 100)
    assert "no EOS (token 9999 of the tokenizer)" in fault(
        tmp_path / "a.npy", Vocabulary(10000, 9999)
    )
    np.save(tmp_path / "a.npy", np.zeros((3, 4), np.uint16))
    assert "an array (3, 4) of uint16" in fault(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.array([None]))
    assert "cannot be read as token ids (" in fault(tmp_path / "a.npy")


# Megatron


def write_megatron(path, groups, kind="<i4", code=4):
    """As megatron.core.datasets.indexed_dataset writes: documents of sequences."""
    sequences = [np.array(ids, kind) for group in groups for ids in group]
    path.write_bytes(b"".join(ids.tobytes() for ids in sequences))
    sizes = [len(ids) for ids in sequences]
    starts = np.cumsum([0, *sizes])[:-1] * np.dtype(kind).itemsize
    borders = np.cumsum([0, *map(len, groups)])
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(sizes), len(borders))
    parts = np.array(sizes, "<i4"), starts.astype("<i8"), borders.astype("<i8")
    path.with_suffix(".idx").write_bytes(index + b"".join(part.tobytes() for part in parts))


@pytest.mark.parametrize(("kind", "code"), [("<i4", 4), ("<u2", 8), ("<i8", 5)])
def test_documents_of_megatron(tmp_path, kind, code):
    """A document may be of several sequences, or of none."""
    path = tmp_path / "a.bin"
    ids = documents()
    groups = [ids[:1], ids[1:4], [], ids[4:5], [ids[5], [], ids[6]]]
    write_megatron(path, groups, kind, code)
    joined_groups = [[token for ids in group for token in ids] for group in groups]
    expected = [(number, ids) for number, ids in enumerate(joined_groups, 1) if ids]
    for skip in (0, 1, 3, 5):
        assert read(path, skip=skip, vocabulary=None) == [e for e in expected if e[0] > skip]
    assert find_files(str(tmp_path)) == ([path], [])


def test_damaged_files_of_megatron_are_named(tmp_path):
    path, index = tmp_path / "a.bin", tmp_path / "a.idx"
    write_megatron(path, [documents()])
    whole, content = path.read_bytes(), index.read_bytes()
    path.write_bytes(whole[:-4])
    assert fault(path).startswith(f"{path}: {len(whole) - 4} bytes, {len(whole)} are expected by")
    path.write_bytes(whole)
    for damaged, cause in (
        (b"MMIDIDX", "no index of Megatron"),
        (content[:-1], f"{len(content) - 1} bytes, {len(content)} are expected"),
        (content[:9] + b"\x02" + content[10:], "version 2, type of ids 4; allowed: version 1"),
        (content[:17] + b"\x07" + content[18:], "version 1, type of ids 7"),
        (content[:-8] + b"\x09" + content[-7:], "documents of sequences that are not there"),
    ):
        index.write_bytes(damaged)
        assert fault(path).startswith(f"{index}: {cause}")


def test_what_megatrons_own_library_wrote(tmp_path):
    pytest.importorskip("megatron.core")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for kind in (np.uint16, np.int32):
        path = tmp_path / f"{np.dtype(kind)}.bin"
        builder = IndexedDatasetBuilder(str(path), dtype=kind)
        for ids in documents()[:3]:
            builder.add_document(torch.tensor(ids), [len(ids)])
        builder.add_document(torch.tensor([7, 8, 9, EOS]), [2, 2])
        builder.finalize(str(path.with_suffix(".idx")))
        assert [ids for _, ids in read(path)] == [*documents()[:3], [7, 8, 9, EOS]]


# MDS


def write_mds(path, columns, rows):
    """As streaming.MDSWriter writes a shard; rows have bytes, in the order of the columns."""
    names, encodings, sizes = zip(*columns, strict=True)
    about = {"column_names": names, "column_encodings": encodings, "column_sizes": sizes}
    about = json.dumps({"format": "mds", "version": 2, **about}).encode()
    samples = []
    for row in rows:
        free = [len(v) for v, size in zip(row, sizes, strict=True) if size is None]
        samples.append(np.array(free, "<u4").tobytes() + b"".join(row))
    start = 4 + 4 * (len(rows) + 1) + len(about)
    offsets = np.cumsum([start, *map(len, samples)]).astype("<u4")
    head = np.array([len(rows)], "<u4").tobytes() + offsets.tobytes()
    path.write_bytes(head + about + b"".join(samples))


def array_value(ids, kind, code=None):
    """Code of the kind if the column has none, one dimension of 16 bit, and the numbers."""
    head = b"" if code is None else bytes([code])
    return (
        head + bytes([1 << 2 | 1]) + np.array([len(ids)], "<u2").tobytes() + kind_bytes(ids, kind)
    )


def kind_bytes(ids, kind):
    return np.array(ids, kind).tobytes()


@pytest.mark.parametrize(("kind", "code"), [("<u2", 16), ("<i4", 33), ("<i8", 65)])
def test_samples_of_mds(tmp_path, kind, code):
    for path, encoding, named in (
        (tmp_path / "a.mds", f"ndarray:{np.dtype(kind)}", None),
        (tmp_path / "b.mds", "ndarray", code),
    ):
        columns = [("id", "int64", 8), ("input_ids", encoding, None), ("name", "str", None)]
        rows = [[b"12345678", array_value(ids, kind, named), b"x"] for ids in documents()]
        write_mds(path, columns, rows)
        for skip in (0, 2, 7):
            assert read(path, skip=skip) == list(enumerate(documents(), 1))[skip:]
    write_mds(
        tmp_path / "c.mds", [("input_ids", "ndarray:uint16:3", 6)], [[kind_bytes([3, 4, 2], "<u2")]]
    )
    assert read(tmp_path / "c.mds") == [(1, [3, 4, 2])]
    (tmp_path / "index.json").write_text("{}")
    assert [path.name for path in find_files(str(tmp_path)).files] == ["a.mds", "b.mds", "c.mds"]


def test_mds_has_texts_masks_and_messages_too(tmp_path):
    path = tmp_path / "a.mds"
    columns = [("input_ids", "ndarray:int32", None), ("loss_mask", "ndarray:uint8", None)]
    write_mds(path, columns, [[array_value([3, 4], "<i4"), array_value([0, 1], "u1")]])
    assert read(path) == [(1, [~3, 4])]
    write_mds(path, [("text", "str", None)], [["caf\u00e9".encode()]])
    assert [record.text() for record in read_records(path, "text")] == ["caf\u00e9"]
    said = [{"role": "user", "content": "x"}]
    write_mds(path, [("messages", "json", None)], [[json.dumps(said).encode()]])
    assert [record.content().messages for record in read_records(path, "messages")] == [said]


def test_bad_mds_is_named(tmp_path):
    path = tmp_path / "a.mds"
    write_mds(path, [("tokens", "bytes", None)], [[b"1234"]])
    assert "column 'input_ids' is missing (found: tokens)" in fault(path)
    write_mds(path, [("input_ids", "bytes", None)], [[b"1234"]])
    assert "sample 1: column 'input_ids' is bytes, which does not say what it is" in fault(path)
    write_mds(path, [("input_ids", "ndarray", None)], [[b"\x07123"]])
    assert "sample 1: column 'input_ids' is no ndarray (KeyError(7))" in fault(path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "bytes are no whole shard of 1 samples" in fault(path)
    path.write_bytes(b"no")
    assert fault(path).startswith(f"{path}: cannot be read as MDS")


def test_what_streamings_own_library_wrote(tmp_path):
    streaming = pytest.importorskip("streaming")
    columns = {"input_ids": "ndarray:uint16", "labels": "ndarray", "text": "str"}
    with streaming.MDSWriter(out=str(tmp_path), columns=columns, size_limit=600) as out:
        for ids in documents():
            labels = np.array([-100, *ids[1:]], np.int64)
            out.write({"input_ids": np.array(ids, np.uint16), "labels": labels, "text": "x"})
    found = find_files(str(tmp_path)).files
    assert len(found) > 1
    assert [ids for path in found for _, ids in read(path)] == [
        [~i[0], *i[1:]] for i in documents()
    ]


# In a run


def settings_for(path, **more):
    return job(
        training__dataset="local",
        training__dataset_path=str(path),
        training__text_column="input_ids",
        training__seq_len=16,
        training__local_batch_size=2,
        **more,
    )


@pytest.mark.parametrize("name", [*ROWS, "a.npy", "llm-c.bin", "a.bin"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_the_text(tmp_path, name, workers):
    texts = number_documents(LENGTHS)
    tokenizer = NumberTokenizer()
    ids = [tokenizer.encode(text, True, True) for text in texts]
    if name in ROWS:
        ROWS[name](tmp_path / name, pa.table({"input_ids": ids}))
    elif name == "a.bin":
        write_megatron(tmp_path / name, [[i] for i in ids])
    else:
        JOINED[name](tmp_path / name, np.concatenate([np.array(i, np.uint32) for i in ids]))
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text" / "a.jsonl", texts, "input_ids")
    more = {"training__dataloader__num_workers": workers}
    found, expected = (
        iter(build_dataloader(2, 1, tokenizer, settings_for(path, **more)))
        for path in (tmp_path / name, tmp_path / "text")
    )
    for _ in range(20):
        assert fingerprint(next(found)) == fingerprint(next(expected))


@pytest.mark.parametrize("format_name", ["npy", "megatron"])
def test_a_mapped_file_takes_no_memory(tmp_path, format_name):
    """80 MB of ids pass; sequences of 65,536 look 8 ahead, which is 2 MB."""
    ids = np.full((500, 40_000), 7, np.int32)
    ids[:, -1] = EOS
    if format_name == "npy":
        path = tmp_path / "a.npy"
        np.save(path, ids.ravel())
    else:
        path = tmp_path / "a.bin"
        write_megatron(path, ids[:, None])
    del ids
    part = DocumentLoader(
        [Member(FileSource(str(path), "text", VOCABULARY), repeat=False)],
        NumberTokenizer(),
        dp_rank=0,
        dp_degree=1,
        vocab_size=2048,
        seq_len=65536,
        batch_size=1,
        packing="pack",
        mask=True,
    )
    tracemalloc.start()
    batches = sum(1 for _ in part)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batches >= 20_000_000 // 65536
    assert peak < 16e6


def test_ids_of_another_model_are_refused_at_startup(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"input_ids": [3, 2048, EOS]}) + "\n")
    args = ["--training.dataset", "local", "--training.dataset_path", str(path)]
    args += ["--training.text_column", "input_ids"]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: token id 2048, the model has 0 to 20"):
        load_config(args, world_size=1)
    path.write_text(json.dumps({"input_ids": [3, 2047, EOS]}) + "\n")
    load_config(args, world_size=1)
    with pytest.raises(ValueError, match=r'documents\.loss_on = "assistant": training reads no'):
        load_config([*args, "--documents.loss_on", "assistant"], world_size=1)


@pytest.mark.parametrize("wrong", [2048, ~2048, -(2**31)])
@pytest.mark.parametrize("form", ["lines", "prepared"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ids_of_another_model_further_on_are_named(tmp_path, wrong, form, workers):
    rows = [[3, 2047, EOS], [4, EOS], [wrong, EOS], [5, EOS]]
    if form == "prepared":
        path, place = (
            write_prepared(tmp_path / "p", NumberTokenizer(), rows),
            "p/shard-00000.arrow, row 3",
        )
    else:
        path, place = tmp_path / "a.jsonl", "a.jsonl, line 3"
        lines = [
            {"input_ids": [max(i, ~i) for i in r], "loss_mask": [i >= 0 for i in r]} for r in rows
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = settings_for(path, training__dataloader__num_workers=workers)
    with pytest.raises(ValueError) as info:  # noqa: PT011
        next(iter(build_dataloader(1, 0, NumberTokenizer(), config)))
    most = max(wrong, ~wrong)
    expected = f"{tmp_path}/{place}: token id {most}, the model has 0 to 2047: the file is damaged"
    assert str(info.value).startswith(expected)


def test_data_without_any_label_are_told_at_startup(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    row = json.dumps({"input_ids": [3, EOS], "labels": [-100, -100]}) + "\n"
    path.write_text(3 * row)
    told = r"a\.jsonl, line 1 to .*line {}: no token is learned, labels or loss_mask beside the ids"
    with pytest.raises(ValueError, match=told.format(3)):
        build_dataloader(1, 0, NumberTokenizer(), settings_for(path))
    path.write_text(20 * row)
    build_dataloader(1, 0, NumberTokenizer(), settings_for(path))
    assert re.search(told.format(16), caplog.text)
    caplog.clear()
    path.write_text(15 * row + json.dumps({"input_ids": [3, EOS]}) + "\n")
    build_dataloader(1, 0, NumberTokenizer(), settings_for(path))
    assert not caplog.text
    config = settings_for(write_prepared(tmp_path / "p", NumberTokenizer(), [[~3, ~EOS]]))
    with pytest.raises(ValueError, match=r"p/manifest\.json: no token of its documents is learned"):
        build_dataloader(1, 0, NumberTokenizer(), config)


def test_an_evaluation_hides_its_needles_in_ids_whether_they_are_learned_or_not(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [7, 8]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FileSource(str(path), "input_ids")
    hay = Haystack(Encoder(NumberTokenizer()), source, count=4)
    assert hay.tokens.tolist() == [5, 6, 7, 8]
    path.write_text(json.dumps({"input_ids": [{"role": "user", "content": "x"}]}) + "\n")
    with pytest.raises(BadDocument, match="line 1: a conversation found, text is expected"):
        Haystack(Encoder(NumberTokenizer()), source, count=4)


def test_a_document_without_eos_is_said(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    for ids, said in (([3, 4], True), ([3, EOS], False)):
        caplog.clear()
        path.write_text(json.dumps({"input_ids": ids}) + "\n")
        with caplog.at_level(logging.WARNING):
            build_dataloader(1, 0, NumberTokenizer(), settings_for(path))
        expected = "line 1: the last token is 4, not the tokenizer's EOS 2; token ids are taken"
        assert (expected in caplog.text) == said
