"""BOS and EOS stand at the ends of a document and nowhere else, whatever the tokenizer adds."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import normalizers, processors

from recipes.data.records import BadDocument, TextFile
from recipes.data.tokens import Tokenizer, build_tokenizer, encode
from recipes.evaluation.haystack import Encoder, insert
from tests import ROOT

ASSETS = ROOT / "assets" / "tokenizer"


def changed(folder, change, config=None):
    """A copy of the bundled tokenizer with another one in it."""
    shutil.copytree(ASSETS, folder, dirs_exist_ok=True)
    tokenizer = HfTokenizer.from_file(str(ASSETS / "tokenizer.json"))
    change(tokenizer)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def add_bos(tokenizer):
    name = "<|begin_of_text|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, tokenizer.token_to_id(name))]
    )


def test_a_post_processor_changes_nothing(tmp_path):
    plain, eager = Tokenizer(str(ASSETS)), Tokenizer(changed(tmp_path, add_bos))
    assert eager.hf_adds_bos
    (tmp_path / "a.txt").write_text("It is a truth.")
    document = TextFile(str(tmp_path / "a.txt"), 1, 0)
    ids = encode(eager, document)
    assert np.array_equal(ids, encode(plain, document))
    assert (ids[0], ids[-1]) == (plain.bos_id, plain.eos_id)
    assert plain.bos_id not in ids[1:]
    hay = [Encoder(t)("The sky is blue. The sun is yellow.") for t in (plain, eager)]
    texts = [
        insert(Encoder(t), h, [(0.5, Encoder(t)(" NEEDLE"))])
        for t, h in zip((plain, eager), hay, strict=True)
    ]
    assert np.array_equal(*texts)
    assert plain.bos_id not in texts[0]


def test_what_a_tokenizer_lacks_is_said(tmp_path, caplog):
    path = changed(tmp_path, lambda _: None)
    (tmp_path / "tokenizer_config.json").unlink()
    build_tokenizer(SimpleNamespace(model=SimpleNamespace(hf_assets_path=path)))
    (record,) = caplog.records
    assert "has no BOS and no EOS" in record.getMessage()


def test_a_document_without_a_token_is_bad(tmp_path):
    def drop(tokenizer):
        tokenizer.normalizer = normalizers.Replace("x", "")

    path = changed(tmp_path, drop, {"tokenizer_class": "PreTrainedTokenizerFast"})
    (tmp_path / "a.txt").write_text("xxx")
    with pytest.raises(BadDocument, match="makes no token of it"):
        encode(Tokenizer(path), TextFile(str(tmp_path / "a.txt"), 1, 0))
