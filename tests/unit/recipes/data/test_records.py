"""Bad documents are found, and named with file, line and remedy."""

import gzip
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.data.files import find_files
from recipes.data.readers import read_records
from recipes.data.records import BadDocument


def records(path, column="text", skip=0):
    return list(read_records(path, column, skip))


def texts(path, column="text", skip=0):
    return [record.text() for record in records(path, column, skip)]


def fault(path, column="text"):
    """The message about the last record, after all before it were good."""
    *good, bad = records(path, column)
    assert all(record.text() for record in good)
    with pytest.raises(BadDocument) as info:
        bad.text()
    return str(info.value)


def jsonl(path, lines):
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def test_a_text_file_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n")
    assert texts(path) == ["one\n\ntwo\n"]
    assert texts(path, skip=1) == []


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".jsonl.gz", ".json.zst", ".parquet"])
def test_one_document_a_line_or_row_from_any_place_on(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    words = [f"text {i}" for i in range(40)]
    content = "".join(json.dumps({"text": word, "id": 1}) + "\n" for word in words)
    if suffix == ".parquet":
        pq.write_table(pa.table({"text": words, "id": [1] * 40}), path, row_group_size=7)
    elif suffix == ".jsonl.gz":
        path.write_bytes(gzip.compress(content.encode()))
    elif suffix == ".json.zst":
        path.write_bytes(pa.compress(content.encode(), "zstd", asbytes=True))
    else:
        path.write_text(content)
    assert texts(path) == words
    for skip in (1, 7, 13, 39, 40):
        assert texts(path, skip=skip) == words[skip:]
        assert [r.number for r in records(path, skip=skip)] == list(range(skip + 1, 41))


def test_blank_lines_are_no_documents(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [b'{"text": "a"}', b"", b'{"text": "b"}', b" "])
    assert [(r.number, r.text()) for r in records(path)] == [(1, "a"), (3, "b")]


GOOD = b'{"text": "good"}'


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        (b'{"text": "caf\xe9"}', "not UTF-8 (byte 0xe9 at offset 13)"),
        (b'{"text": "  \\n"}', "the document is empty"),
        (b'{"body": "x", "id": 3}', "column 'text' is missing (found: body, id)"),
        (
            b'{"text": 3}',
            "column 'text' is int, text, a list of token ids or a list of messages is",
        ),
        (b'{"text": "cut', "not JSON (Invalid control character at, column 14)"),
        (b'["text"]', "a JSON object is expected, found list"),
        (b'{"text": "x", "n": %s}' % (b"9" * 5000), "not JSON that can be read (Exceeds the limit"),
        (b"[" * 100_000, "not JSON that can be read (maximum recursion"),
        (b'{"text": "\\ud83d"}', "column 'text' holds half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, cause):
    message = fault(jsonl(tmp_path / "a.jsonl", [GOOD, GOOD, line]))
    assert message.startswith(f"{tmp_path}/a.jsonl, line 3: {cause}")
    assert "--skip-bad" in message


def test_bad_utf8_in_a_text_file_names_its_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthr\xff\n")
    assert fault(path).startswith(f"{path}, line 3: not UTF-8 (byte 0xff at offset 11)")


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst", ".jsonl"])
def test_a_byte_order_mark_is_no_text(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    text = b"\xef\xbb\xbf" + (GOOD + b"\n" + GOOD if suffix == ".jsonl" else b"good")
    if suffix.endswith(".gz"):
        text = gzip.compress(text)
    elif suffix.endswith(".zst"):
        text = pa.compress(text, "zstd", asbytes=True)
    path.write_bytes(text)
    assert texts(path) == ["good"] * (2 if suffix == ".jsonl" else 1)


def test_a_document_has_a_limit(tmp_path, monkeypatch):
    """A line without end is not held: what is read of it stays near the limit."""
    monkeypatch.setattr("recipes.data.records.MAX_BYTES", 1 << 20)
    long = json.dumps({"text": "x" * (5 << 20)}).encode()
    lines = tmp_path / "a.jsonl.gz"
    lines.write_bytes(gzip.compress(b"\n".join([GOOD, long, GOOD])))
    good, bad, last = records(lines)
    assert (good.text(), last.text(), last.number) == ("good", "good", 3)
    text = tmp_path / "a.txt"
    text.write_bytes(long)
    rows = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x" * (2 << 20)]}), rows)
    for record, place in (
        (bad, f"{lines}, line 2"),
        (records(text)[0], text),
        (records(rows)[0], f"{rows}, row 1"),
    ):
        with pytest.raises(BadDocument, match="longer than 1 MiB") as info:
            record.text()
        assert str(info.value).startswith(f"{place}: ")


@pytest.mark.parametrize("damage", ["cut", "flipped", "no gzip"])
def test_a_corrupt_gzip_names_the_line_it_breaks_at(tmp_path, damage):
    lines = b"".join(b'{"text": "%d"}\n' % (i * 7919**4) for i in range(2000))
    data = bytearray(gzip.compress(lines))
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "flipped":
        data[len(data) // 2] ^= 0xFF
    else:
        data = bytearray(b"plain text")
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(data)
    *_, last = records(path)
    with pytest.raises(BadDocument, match="cannot be read on") as info:
        last.text()
    assert str(info.value).startswith(f"{path}, line {last.number}: ")
    assert "gzip -t" in str(info.value)
    assert last.number == 1 if damage == "no gzip" else last.number > 100


def test_bad_parquet_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), path)
    assert fault(path).startswith(f"{path}: column 'text' is missing (found: body, n)")
    assert fault(path, "n").startswith(f"{path}: column 'n' is int64, text, a list of")
    pq.write_table(pa.table({"text": ["x", None]}), path)
    assert fault(path).startswith(f"{path}, row 2: the document is empty")
    path.write_bytes(b"PAR1 is not enough")
    assert fault(path).startswith(f"{path}: cannot be read as Parquet")


def test_records_and_their_faults_can_be_sent_to_a_process(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [GOOD, b"{"])
    good, bad = pickle.loads(pickle.dumps(records(path)))
    assert good.text() == "good"
    with pytest.raises(BadDocument) as info:
        bad.text()
    unreadable = BadDocument("a.parquet", "cut off", "fetch it anew")
    for fault in (info.value, unreadable):
        assert str(pickle.loads(pickle.dumps(fault))) == str(fault)


def test_files_are_found_by_name_folder_and_glob(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.jsonl", "sub/c.parquet", "notes.md"):
        (tmp_path / name).write_text("x")
    names = [str(path.relative_to(tmp_path)) for path in find_files(str(tmp_path)).files]
    assert names == ["a.jsonl", "b.txt", "sub/c.parquet"]
    assert find_files(f"{tmp_path}/*.txt").files == [tmp_path / "b.txt"]
    assert find_files(f"{tmp_path}/**/*.parquet").files == [tmp_path / "sub" / "c.parquet"]
    (tmp_path / "we[ir]d.txt").write_text("x")
    assert find_files(f"{tmp_path}/we[ir]d.txt").files == [tmp_path / "we[ir]d.txt"]
    with pytest.raises(ValueError, match=r"notes\.md is of an unknown kind"):
        find_files(f"{tmp_path}/notes.md")
    with pytest.raises(ValueError, match="no such file"):
        find_files(f"{tmp_path}/*.jsonl.gz")


def test_what_is_no_data_is_left_out_and_named(tmp_path):
    (tmp_path / ".ipynb_checkpoints").mkdir()
    data = ["a.jsonl", "b.json", "c.jsonl.zst", "readmes.txt"]
    other = [".ipynb_checkpoints/a-checkpoint.jsonl", ".b.txt", "LICENSE.txt", "README.txt", "x.md"]
    for name in (*data, *other):
        (tmp_path / name).touch()
    found = find_files(str(tmp_path))
    assert [path.name for path in found.files] == data
    assert found.left_out == [tmp_path / name for name in sorted(other)]
    assert found.told() == (
        f"5 files left out: {tmp_path}/.b.txt, {tmp_path}/.ipynb_checkpoints/a-checkpoint.jsonl, "
        f"{tmp_path}/LICENSE.txt, ..."
    )
    # Asked for by name or glob, it is data.
    both = find_files([str(tmp_path), f"{tmp_path}/READ*.txt"])
    assert tmp_path / "README.txt" in both.files
    assert tmp_path / "README.txt" not in both.left_out
