"""Tokenizers as they come: BOS and EOS where they are asked for, and what is missing is said."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers.normalizers import Replace
from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

from recipes.data.dataset import SAMPLE, build_dataloader
from recipes.data.records import BadDocument, Row, TextFile
from recipes.data.sources import FileSource
from recipes.data.tokens import Tokenizer, encode, tokenizer_identity
from recipes.evaluation.evaluator import list_cases
from recipes.evaluation.haystack import Encoder, Haystack
from recipes.preflight import load_config
from tests import ROOT
from tests.helpers.documents import job, write_jsonl

ASSETS = ROOT / "assets" / "tokenizer"
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL = [(BOS, 0), (EOS, 1)]
TEXT = "It is a truth universally acknowledged."

# What makes of tokenizer.json what others ship: Llama-3's post-processor, one that also ends texts,
# and files that were saved after a use that cut or padded texts.
LIKE_OTHERS: dict[str, Callable[[tokenizers.Tokenizer], None]] = {
    "bos": lambda t: setattr(
        t,
        "post_processor",
        Sequence([ByteLevel(), TemplateProcessing(single=f"{BOS} $A", special_tokens=SPECIAL)]),
    ),
    "bos and eos": lambda t: setattr(
        t, "post_processor", TemplateProcessing(single=f"{BOS} $A {EOS}", special_tokens=SPECIAL)
    ),
    "cut": lambda t: t.enable_truncation(4),
    "padded": lambda t: t.enable_padding(length=500),
}


def save(
    folder: Path,
    change: Callable[[tokenizers.Tokenizer], None] = lambda _: None,
    config: dict | None = {"bos_token": BOS, "eos_token": EOS},  # noqa: B006
) -> Tokenizer:
    """The tokenizer of `assets`, changed, with this tokenizer_config.json."""
    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer(str(folder))


@pytest.fixture(params=LIKE_OTHERS)
def other(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return save(tmp_path, LIKE_OTHERS[request.param])


def test_bos_and_eos_stand_where_they_are_asked_for(other: Tokenizer) -> None:
    plain = Tokenizer(str(ASSETS))
    ids = plain.encode(TEXT, False, False)
    assert plain.decode(ids) == TEXT
    assert other.encode(TEXT, False, False) == ids
    assert other.encode(TEXT, True, False) == [0, *ids]
    assert other.encode(TEXT, False, True) == [*ids, 1]
    assert other.encode("", True, True) == [0, 1]
    assert tokenizer_identity(other) == tokenizer_identity(plain)


def test_evaluation_texts_begin_with_bos_and_have_no_other(other: Tokenizer) -> None:
    config = load_config(
        ["--evaluation.lengths", "512", "--evaluation.depths", "0.5", "--evaluation.samples", "1"]
    )
    made = []
    for tokenizer in (Tokenizer(str(ASSETS)), other):
        encoder = Encoder(tokenizer)
        hay = Haystack(encoder, FileSource(str(SAMPLE), "text"), count=1)
        made.append([case.make(encoder, hay).tokens for case in list_cases(config)])
    for tokens, expected in zip(*made, strict=True):
        assert np.array_equal(tokens, expected)
        assert (tokens == 0).nonzero()[0].tolist() == [0]
        assert not (tokens == 1).any()


def test_one_token_may_be_bos_and_eos(tmp_path: Path) -> None:
    tokenizer = save(tmp_path, config={"bos_token": EOS, "eos_token": {"content": EOS}})
    assert tokenizer.encode("", True, True) == [1, 1]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "{} is missing: documents have no BOS and no EOS"),
        ({"bos_token": BOS}, "{} has no eos_token: documents have no EOS"),
        ({"eos_token": None}, "{} has no eos_token: documents have no BOS and no EOS"),
        ({"eos_token": EOS}, None),
    ],
)
def test_a_tokenizer_without_eos_is_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict | None, message: str | None
) -> None:
    # As other programs read it; not this one.
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": EOS}))
    tokenizer = save(tmp_path, config=config)
    with caplog.at_level(logging.WARNING):
        tokenizer.warn_without_eos()
    expected = [] if message is None else [message.format(tmp_path / "tokenizer_config.json")]
    assert [record.message for record in caplog.records] == expected


def drop_snowmen(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.normalizer = Replace("\u2603", "")


@pytest.mark.parametrize("config", [None, {"bos_token": BOS, "eos_token": EOS}])
def test_a_document_of_which_nothing_is_left_is_bad(tmp_path: Path, config: dict | None) -> None:
    tokenizer = save(tmp_path, drop_snowmen, config)
    path = tmp_path / "snow.txt"
    path.write_text("\u2603\u2603")
    with pytest.raises(BadDocument, match=r"snow\.txt: the tokenizer makes no token of it"):
        encode(tokenizer, TextFile(str(path), 1, 0))
    # Nobody can correct the hub's.
    assert encode(tokenizer, Row("owner/name", 1, 0, "\u2603")).tolist() == []


@pytest.mark.parametrize("packing", ["pack", "concat"])
def test_such_a_document_stops_the_loader_with_its_place(tmp_path: Path, packing: str) -> None:
    tokenizer = save(tmp_path, drop_snowmen, None)
    write_jsonl(tmp_path / "a.jsonl", ["Winter.", "\u2603", "Spring."])
    config = job(
        training__dataset="local",
        training__dataset_path=str(tmp_path / "a.jsonl"),
        training__seq_len=64,
        documents__mask=False,
        documents__packing=packing,
    )
    with pytest.raises(BadDocument, match=r"a\.jsonl, line 2: the tokenizer makes no token"):
        next(iter(build_dataloader(1, 0, tokenizer, config)))
