"""The documents that `plan.py --data` plans for."""

import numpy as np
import plan as plan_script
import pytest

from recipes.config.schema import MixtureSource
from recipes.data.shards import FORMAT, MANIFEST, VERSION, write_json, write_shard
from recipes.models.llama3 import LLAMA3
from recipes.planner.data import typical_documents
from tests import ROOT
from tests.helpers.documents import job

RECIPE = str(ROOT / "train_configs/llama3_8b_128k_packed.toml")


def prepare(folder, lengths):
    folder.mkdir()
    shard = folder / "shard-00000.arrow"
    write_shard(shard, [np.zeros(n, np.int32) for n in lengths])
    entry = {"file": shard.name, "bytes": shard.stat().st_size}
    tokenizer = {"path": "of/the/model", "sha256": "0"}
    manifest = {"format": FORMAT, "version": VERSION, "tokenizer": tokenizer, "shards": [entry]}
    write_json(folder / MANIFEST, manifest)
    return str(folder)


def test_a_sequence_as_the_run_packs_it(tmp_path):
    folder = prepare(tmp_path / "books", [30_000, 20_000, 700] * 20)
    config = job(training__seq_len=51_000)
    documents, text = typical_documents(config, folder)
    assert sorted(documents) == [300, 700, 20_000, 30_000]  # the last is padding
    assert text.startswith(f"{folder}: 64 sequences packed, on average 4.0 documents and 50.")
    config.documents.packing = "concat"
    joined, _ = typical_documents(config, folder)
    assert sum(joined) == 51_000
    assert joined != documents


def test_the_sources_of_a_mixture_in_their_shares(tmp_path):
    long, short = prepare(tmp_path / "a", [4096] * 9), prepare(tmp_path / "b", [512] * 900)
    mixture = [
        MixtureSource(dataset="local", dataset_path=long, weight=3),
        MixtureSource(dataset="local", dataset_path=short, weight=1),
    ]
    config = job(training__seq_len=4096, training__mixture=mixture)
    documents, text = typical_documents(config)
    pairs_of = LLAMA3.flavors["8B"].visible_pairs
    pairs = 0.75 * pairs_of((4096,)) + 0.25 * pairs_of((512,) * 8)
    assert "on average 2.8 documents" in text
    assert f"{pairs / pairs_of((4096,)):.1%}" in text
    assert documents == (4096,)
    config.training.mixture[0].seq_len = 1024
    documents, _ = typical_documents(config)
    assert documents == (1024,) * 4


def test_what_is_not_prepared_has_no_known_lengths(tmp_path):
    config = job(training__dataset="local", training__dataset_path="data/*.jsonl")
    with pytest.raises(ValueError, match=r"training: data/\*.jsonl is not a folder that"):
        typical_documents(config)
    with pytest.raises(ValueError, match="--data: nowhere is not a folder that"):
        typical_documents(config, "nowhere")


def test_the_option(tmp_path, capsys):
    folder = prepare(tmp_path / "a", [65_536] * 20)
    run = (RECIPE, "--gpus", "8", "--gpu", "h100")
    assert plan_script.main([*run, "--data", folder, "--json"]) == 0
    with_data = capsys.readouterr().out
    assert plan_script.main([*run, "--documents", "65536,65536", "--json"]) == 0
    assert capsys.readouterr().out == with_data
    for more, expected in (
        (("--data", folder, "--documents", "5"), "--documents: --data says how long they are"),
        (("--data", folder, "--search"), "--data: --search has no use for it"),
        (("--data", folder, "--documents.no_mask"), "--data would change nothing"),
    ):
        assert plan_script.main([*run, *more]) == 2
        assert expected in capsys.readouterr().err
