"""scripts/inspect_data.py: what it prints of sequences, sources and lengths, and its picture."""

from dataclasses import replace

import inspect_data
import pytest
import torch

from recipes.data import inspection
from recipes.data.inspection import document_lengths, lengths_text, sequences_text
from recipes.data.loader import DocumentLoader
from recipes.data.sources import FileSource
from recipes.data.streams import Member
from tests.helpers.documents import NumberTokenizer, number_documents, write_jsonl

RECIPE = """
[model]
hf_assets_path = "assets/tokenizer"
[rope]
scaling = "none"
[training]
seq_len = 64
[[training.mixture]]
dataset = "local"
dataset_path = "assets/corpus/paragraphs.jsonl.gz"
weight = 3
[[training.mixture]]
name = "lines"
dataset = "local"
dataset_path = "{lines}"
max_tokens = 40
"""


class Decoding(NumberTokenizer):
    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


@pytest.fixture
def loader(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", number_documents([30, 5, 90]))
    members = [Member(FileSource(str(file), "text"), "a", repeat=False, min_tokens=6)]
    how = {"dp_rank": 0, "dp_degree": 1, "seq_len": 40, "batch_size": 1, "vocab_size": 2048}
    return DocumentLoader(members, Decoding(), packing="pack", mask=True, **how)


def test_documents_borders_loss_and_padding(loader):
    first, *_, last = sequences_text(loader, Decoding(), 10)
    title, document, rest = first.splitlines()
    counted = "39 of 40 tokens count in the loss (97.5%), 0 are padding"
    assert title == f"sequence 1: 2 documents, {counted}"
    ends = "10 11 12 13 14 15 16 17 18 19 20 21 ... 27 28 29 30 31 32 33 34 35 36 37 2"
    assert document.split(": ")[1] == f"[[1]]{ends}"
    assert "30 tokens,        29 in the loss:" in document
    assert "10 tokens,        10 in the loss, goes on: [[1]]41 42" in rest
    assert last.splitlines()[0].endswith(counted)


def test_what_is_not_learnt_is_marked(loader, monkeypatch):
    """As of a conversation, of which only answers count."""
    inputs = {"input": torch.arange(100, 140)[None], "boundaries": torch.tensor([[0, 36, 40]])}
    inputs["input"][0, 36:] = 0
    labels = torch.full((1, 40), -100)
    for answer in ((9, 12), (20, 36)):
        labels[0, answer[0] - 1 : answer[1] - 1] = 7
    monkeypatch.setattr(DocumentLoader, "__iter__", lambda self: iter([(inputs, labels)]))
    (text,) = sequences_text(loader, Decoding(), 1)
    title, document = text.splitlines()
    assert "1 documents, 19 of 40 tokens count in the loss (47.5%), 4 are padding" in title
    assert document.split("loss: ")[1] == (
        "[[100 101 102 103 104 105 106 107 108]]109 110 111"
        "[[112 113 114 115 116 117 118 119]]120 121 122 123 124 125 126 127 128 129 130 131 132 "
        "133 134 135"
    )


def test_lengths_are_those_of_the_documents_that_are_read(loader):
    lengths, which = document_lengths(loader.members[0], Decoding())
    assert (lengths.tolist(), which) == ([30, 90], "all")
    head, _, *rows = lengths_text("a", lengths, which).splitlines()
    assert head == "a: 2 documents (all), 120 tokens, longest 90, median 60"
    assert [row.split()[:4] for row in rows] == [
        ["16", "to", "31", "1"],
        ["32", "to", "63", "0"],
        ["64", "to", "127", "1"],
    ]


def test_a_source_whose_first_documents_are_all_left_out(loader, monkeypatch):
    monkeypatch.setattr(inspection, "_COUNTED_DOCUMENTS", 1)
    lengths, which = document_lengths(replace(loader.members[0], min_tokens=50), Decoding())
    assert lengths_text("a", lengths, which) == (
        "a: no documents (the first 1), min_tokens and max_tokens leave all of them out"
    )


def test_the_command(tmp_path, capsys):
    lines = write_jsonl(tmp_path / "lines.jsonl", ["It is a truth", "universally " * 100] * 9)
    recipe = tmp_path / "x.toml"
    recipe.write_text(RECIPE.format(lines=lines))
    picture = tmp_path / "lengths.png"
    arguments = [str(recipe), "--sequences", "8", "--png", str(picture), "--training.steps", "3"]
    assert inspect_data.main(arguments) == 0
    output = capsys.readouterr().out
    assert output.count("count in the loss (") == 8
    assert "sequence 1 of paragraphs: " in output
    shares = {line.split()[0]: line.split()[1:3] for line in output.splitlines() if "%    " in line}
    assert shares["paragraphs"][0] == "75.0%"
    assert "lines: 9 documents (all)" in output
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_refusals(tmp_path, capsys):
    recipe = tmp_path / "x.toml"
    recipe.write_text(RECIPE.format(lines=tmp_path / "none.jsonl"))
    assert inspect_data.main([str(recipe), "--sequences", "0"]) == 2
    assert inspect_data.main([str(recipe)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "--sequences 0: at least 1"
    assert "training.mixture.2.dataset_path" in second
    assert "none.jsonl: no such file" in second
