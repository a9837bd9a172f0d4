"""scripts/prepare_documents.py from the command line: shards, interruption, bad documents."""

import gzip
import json
import random
import signal
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipes.data.dataset import build_dataloader
from recipes.data.files import find_files
from recipes.data.prepare import Settings, clear
from recipes.data.prepare import prepare as prepare_folder
from recipes.data.readers import read_records
from recipes.data.records import BadDocument
from recipes.data.shards import ShardFolder, write_json
from recipes.data.tokens import Tokenizer, encode
from recipes.preflight import load_config
from tests import ROOT
from tests.helpers.chats import chat_tokenizer

TOKENIZER = ROOT / "assets" / "tokenizer"


def command(*args):
    script = ROOT / "scripts" / "prepare_documents.py"
    return [sys.executable, str(script), *map(str, args), "--tokenizer", str(TOKENIZER)]


def prepare(*args, **more):
    return subprocess.run(command(*args), capture_output=True, text=True, timeout=240, **more)


def words(count, seed):
    rng = random.Random(seed)
    return " ".join(
        rng.choice(["truth", "fortune", "wife", "ball", "letter"]) for _ in range(count)
    )


def content(folder):
    """The bytes of every file of a prepared folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_all_kinds_of_files_become_tokens_and_a_summary(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    texts = [words(20 * (i + 1), i) for i in range(6)]
    pq.write_table(pa.table({"body": texts[:2]}), data / "a.parquet")
    lines = "".join(json.dumps({"body": text}) + "\n" for text in texts[2:5])
    (data / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (data / "c.txt").write_text(texts[5])
    done = prepare(data, "--output", tmp_path / "out", "--text-column", "body", "--workers", 2)
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer(str(TOKENIZER))
    expected = [tokenizer.encode(text, add_bos=True, add_eos=True) for text in texts]
    shards = ShardFolder(tmp_path / "out")
    assert [shards[i].value.tolist() for i in range(len(shards))] == expected
    total = sum(map(len, expected))
    assert f"6 documents, {total:,} tokens, 1 files" in done.stdout
    assert f"longest {max(map(len, expected)):,}" in done.stdout
    assert "documents cut" in done.stdout
    assert f"6 documents, {total:,} tokens" in done.stderr  # the progress bar


def test_a_killed_preparation_is_no_data_and_goes_on_where_it_stopped(tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"text": words(80, i)}) + "\n" for i in range(3000)))
    killed = tmp_path / "killed"
    process = subprocess.Popen(
        command(data, "--output", killed, "--shard-tokens", 5000, "--workers", 1),
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (killed / "shard-00003.arrow").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "manifest.json").exists()
    with pytest.raises(ValueError, match="did not finish"):
        ShardFolder(killed)
    whole_before = len(json.loads((killed / "progress.json").read_text())["shards"])
    assert whole_before >= 3
    (killed / "shard-00777.arrow.tmp").write_bytes(b"half a shard")

    first = (killed / "shard-00000.arrow").stat().st_mtime_ns
    settings = Settings([data], "text", str(TOKENIZER), 5000, skip_bad=False)
    prepare_folder(settings, killed, 1, lambda _: None)
    assert (killed / "shard-00000.arrow").stat().st_mtime_ns == first
    whole = tmp_path / "whole"
    prepare_folder(settings, whole, 2, lambda _: None)
    assert content(killed) == content(whole)
    assert len(ShardFolder(whole)) == 3000


def test_a_bad_document_stops_or_is_left_out_and_counted(tmp_path):
    good = json.dumps({"text": "It is a truth."})
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good.encode(), b'{"text": "\xff"}', b"{}"]))
    broken = gzip.compress("".join(good + "\n" for _ in range(3)).encode())[:-12]
    (tmp_path / "b.jsonl.gz").write_bytes(broken)
    (tmp_path / "c.txt").write_text(" \n")
    settings = Settings(
        find_files(str(tmp_path)).files, "text", str(TOKENIZER), 100, skip_bad=False
    )
    with pytest.raises(BadDocument, match=r"a\.jsonl, line 2: not UTF-8 .*--skip-bad"):
        prepare_folder(settings, tmp_path / "out", 1, lambda _: None)
    assert not (tmp_path / "out" / "manifest.json").exists()
    stopped = prepare(tmp_path, "--output", tmp_path / "out2")
    assert stopped.stderr.count("a.jsonl, line 2: not UTF-8") == 1

    # As the message advises.
    done = prepare(tmp_path, "--output", tmp_path / "out2", "--skip-bad")
    assert done.returncode == 0, done.stderr
    for fault in (
        "a.jsonl, line 2: not UTF-8",
        "a.jsonl, line 3: column",
        "c.txt: the document is",
    ):
        assert f"bad document: {tmp_path}/{fault}" in done.stderr
    assert "b.jsonl.gz, line" in done.stderr
    assert "left out: 4 bad documents" in done.stdout
    manifest = json.loads((tmp_path / "out2" / "manifest.json").read_text())
    assert manifest["bad_documents"] == 4
    assert manifest["documents"] >= 1


def test_an_input_that_is_not_there_is_named(tmp_path):
    done = prepare("none.txt", "--output", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: none.txt: no such file; allowed: .txt")


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "a.txt").write_text("It is a truth.")
    settings = Settings([tmp_path / "a.txt"], "text", str(TOKENIZER), 100, skip_bad=False)
    output = tmp_path / "out"
    prepare_folder(settings, output, 1, lambda _: None)
    with pytest.raises(ValueError, match="is finished; --overwrite prepares it anew"):
        prepare_folder(settings, output, 1, lambda _: None)
    clear(output)
    assert list(output.iterdir()) == []
    (output / "precious").touch()
    with pytest.raises(ValueError, match="is not empty; give a new folder"):
        prepare_folder(settings, output, 1, lambda _: None)
    write_json(output / "progress.json", {"settings": {"files": "x"}, "shards": []})
    with pytest.raises(ValueError, match=r"progress\.json: damaged"):
        prepare_folder(settings, output, 1, lambda _: None)
    state = {"settings": {"files": "x"}, "shards": [], "bad_documents": 0, "after": [0, 0]}
    write_json(output / "progress.json", state)
    with pytest.raises(ValueError, match="begun with other files, tokenizer, shard_tokens"):
        prepare_folder(settings, output, 1, lambda _: None)
    clear(output)
    assert [path.name for path in output.iterdir()] == ["precious"]


def test_a_corrupt_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"^--tokenizer {tmp_path}: "):
        prepare_folder(Settings([], "text", str(tmp_path), 100, False), tmp_path, 1, print)


def chats(path, count):
    rows = [
        {
            "messages": [
                {"role": "user", "content": words(20 + i, i)},
                {"role": "assistant", "content": words(10, -i)},
            ]
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_conversations_are_tokenized_once_with_what_is_learned(tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", "Qwen3")
    data = chats(tmp_path / "a.jsonl", 5)
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts/prepare_documents.py"), str(data)),
            *("--tokenizer", tokenizer.tokenizer_path, "--output", str(tmp_path / "out")),
            *("--text-column", "messages", "--loss-on", "last", "--workers", "1"),
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    expected = [encode(tokenizer, record, "last") for record in read_records(data, "messages")]
    shards = ShardFolder(tmp_path / "out")
    assert [shards[i].value.tolist() for i in range(5)] == [tokens.tolist() for tokens in expected]
    learned = sum(int((tokens >= 0).sum()) for tokens in expected)
    assert 0 < learned < 0.6 * sum(map(len, expected))
    assert f"loss on last: {learned:,} tokens, " in done.stdout
    # Training learns what was prepared, and says so where it is asked for something else.
    args = ["--training.dataset", "local", "--training.dataset_path", str(tmp_path / "out")]
    args += ["--model.hf_assets_path", tokenizer.tokenizer_path, "--training.seq_len", "128"]
    config = load_config([*args, "--documents.loss_on", "last"], world_size=1)
    batches = build_dataloader(1, 0, tokenizer, config, infinite=False)
    assert sum(int((labels != -100).sum()) for _, labels in batches) == learned
    with pytest.raises(ValueError, match=r'documents.loss_on = "all": .*out was prepared with'):
        load_config(args, world_size=1)


def test_a_loss_on_turns_needs_conversations_and_goes_on_with_the_same(tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "tokenizer", "Qwen3")
    path, output = tokenizer.tokenizer_path, tmp_path / "out"
    (tmp_path / "a.txt").write_text("It is a truth.")
    text = Settings([tmp_path / "a.txt"], "text", path, 100, False, "assistant")
    with pytest.raises(ValueError, match=r"--loss-on assistant: .*a\.txt holds no conversations"):
        prepare_folder(text, output, 1, lambda _: None)
    data = [chats(tmp_path / "a.jsonl", 3)]
    prepare_folder(Settings(data, "messages", path, 100, False), output, 1, lambda _: None)
    assert json.loads((output / "manifest.json").read_text())["loss_on"] == "all"
    state = {"files": "x", "tokenizer": "x", "shard_tokens": 100, "loss_on": "all"}
    clear(output)
    write_json(
        output / "progress.json",
        {"settings": state, "shards": [], "bad_documents": 0, "after": [0, 0]},
    )
    with pytest.raises(ValueError, match="begun with other files, tokenizer, loss_on, chat_templ"):
        prepare_folder(
            Settings(data, "messages", path, 100, False, "last"), output, 1, lambda _: None
        )
