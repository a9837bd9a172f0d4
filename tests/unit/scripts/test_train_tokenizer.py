"""The tokenizer's script reads what the preparation of documents reads."""

import gzip
import json
from pathlib import Path

import pytest
from train_tokenizer import BOS, train

TEXT = "the cat sat on the mat, the cat sat on the hat " * 20


def _plain(folder: Path) -> str:
    (folder / "a.txt").write_text(TEXT)
    return str(folder / "a.txt")


def _gzipped(folder: Path) -> str:
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write(json.dumps({"text": TEXT}))
    return str(folder / "a.jsonl.gz")


def _folder(folder: Path) -> str:
    _gzipped(folder)
    (folder / "README.md").write_text("zzqx " * 100)
    return str(folder)


@pytest.mark.parametrize("corpus", [_plain, _gzipped, _folder])
def test_words_of_the_corpus_become_tokens(corpus, tmp_path):
    tokenizer = train(corpus(tmp_path), vocab_size=290)
    assert tokenizer.token_to_id(BOS) == 0
    assert len(tokenizer.encode("the cat sat").tokens) == 3
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT
    assert len(tokenizer.encode("zzqx").tokens) == 4
