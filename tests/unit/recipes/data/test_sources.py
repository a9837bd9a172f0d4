"""Hugging Face datasets, torchtitan's own names, prepared folders, and what the names mean."""

import re

import numpy as np
import pytest
from datasets import load_dataset
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from recipes.data.dataset import build_dataloader
from recipes.data.shards import MANIFEST, ShardFolder
from recipes.data.tokens import encode
from recipes.preflight import load_config
from tests.helpers.documents import (
    NumberTokenizer,
    fingerprint,
    job,
    number_documents,
    write_jsonl,
    write_prepared,
)

LENGTHS = [30, 5, 12, 90, 7, 7, 41, 16, 3, 25, 64, 10]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder as the hub has them: `datasets` opens it by its path."""
    folder = tmp_path_factory.mktemp("owner") / "books"
    folder.mkdir()
    texts = number_documents(LENGTHS)
    for part in range(3):
        write_jsonl(folder / f"train-{part}.jsonl", texts[4 * part : 4 * part + 4])
    write_jsonl(folder / "validation.jsonl", ["5 6", "", "7 8"])
    return str(folder)


def loader(dataset, rank=0, degree=1, infinite=True, **more):
    config = job(
        training__dataset=dataset, training__seq_len=16, training__local_batch_size=1, **more
    )
    return build_dataloader(degree, rank, NumberTokenizer(), config, infinite)


def inner_tokens(batches):
    return [t for inputs, _ in batches for t in inputs["input"].flatten().tolist() if t >= 10]


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_a_streamed_dataset_is_read_once_by_all_ranks_together(hub, degree):
    ranks = [inner_tokens(loader(hub, r, degree, infinite=False)) for r in range(degree)]
    everything = [token for tokens in ranks for token in tokens]
    assert all(ranks)
    assert sorted(everything) == list(range(10, 10 + sum(LENGTHS) - 2 * len(LENGTHS)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_of_which_no_token_is_made_does_not_go_on_for_ever(hub, workers, monkeypatch):
    monkeypatch.setattr(NumberTokenizer, "encode", lambda *args, **kwargs: [])
    with pytest.raises(ValueError, match="the tokenizer makes no token of any document"):
        next(iter(loader(hub, training__dataloader__num_workers=workers)))
    assert inner_tokens(loader(hub, infinite=False)) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streamed_dataset_resumes_twice(hub, workers):
    """In the middle of a file, and in a later epoch; `datasets` 5.0.0 restarted the second time."""
    more = {"rank": 1, "degree": 2, "training__dataloader__num_workers": workers}
    batches = iter(loader(hub, **more))
    expected = [fingerprint(next(batches)) for _ in range(40)]
    found, state = [], None
    for count in (3, 14, 23):
        part = loader(hub, **more)
        if state is not None:
            part.load_state_dict(state)
        batches = iter(part)
        found += [fingerprint(next(batches)) for _ in range(count)]
        state = part.state_dict()
    assert found == expected
    assert part.epoch >= 2


def test_split_and_column_of_a_dataset(hub, caplog):
    batches = loader(hub, infinite=False, training__dataset_split="validation")
    ((inputs, _),) = batches
    # The document without text is left out.
    assert inputs["input"][0, :9].tolist() == [1, 5, 6, 2, 1, 7, 8, 2, 0]
    with pytest.raises(ValueError, match=r"row 1: column 'body' is missing \(found: text\)"):
        loader(hub, training__text_column="body")


def test_a_dataset_that_cannot_be_opened_is_named(tmp_path):
    missing = str(tmp_path / "no" / "such")
    with pytest.raises(ValueError, match=f"training.dataset: {missing} cannot be opened"):
        loader(missing)


def test_a_dataset_of_several_subsets_is_refused_with_their_names(tmp_path):
    folder = tmp_path / "owner" / "wiki"
    folder.mkdir(parents=True)
    for name in ("german", "latin"):
        write_jsonl(folder / f"{name}.jsonl", ["5 6 7"])
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: german\n  data_files: german.jsonl\n"
        "- config_name: latin\n  data_files: latin.jsonl\n---\n"
    )
    with pytest.raises(ValueError, match="cannot be opened") as info:
        loader(str(folder))
    assert "\n" not in str(info.value)
    assert "['german', 'latin']" in str(info.value)
    assert "(training.dataset_subset)" in str(info.value)
    next(iter(loader(str(folder), training__dataset_subset="latin")))


@pytest.mark.parametrize("mask", [False, True])
def test_concat_yields_the_sequences_of_torchtitans_own_dataset(hub, monkeypatch, mask):
    """torchtitan's names keep their meaning: same inputs, and same labels but across borders."""

    def open_train(path):
        return load_dataset(path, split="train")

    monkeypatch.setattr(DATASETS["c4_test"], "loader", open_train)
    stock = iter(HuggingFaceTextDataset("c4_test", hub, NumberTokenizer(), 16, infinite=True))
    config = {"documents__packing": "concat", "documents__mask": mask}
    part = iter(loader("c4_test", training__dataset_path=hub, **config))
    for _ in range(60):
        expected, expected_labels = next(stock)
        inputs, labels = next(part)
        assert inputs["input"][0].tolist() == expected["input"].tolist()
        if mask:
            borders = expected["input"] == NumberTokenizer.eos_id
            expected_labels = expected_labels.masked_fill(borders, -100)
        assert labels[0].tolist() == expected_labels.tolist()


@pytest.fixture
def prepared(tmp_path):
    """A finished folder of two shards, as prepare_documents.py writes it."""
    tokenizer = NumberTokenizer()
    tokens = [
        encode_text(tokenizer, text) for text in number_documents([4, 9, 5, 30, 3, 12, 7, 20])
    ]
    return write_prepared(tmp_path / "prepared", tokenizer, tokens[:3], tokens[3:]), tokens


def encode_text(tokenizer, text):
    return np.array(tokenizer.encode(text, add_bos=True, add_eos=True), np.int32)


def prepared_loader(folder, rank=0, degree=1, infinite=True, **more):
    return loader("local", rank, degree, infinite, training__dataset_path=str(folder), **more)


def test_prepared_documents_are_read_through_a_memory_map(prepared):
    folder, tokens = prepared
    shards = ShardFolder(folder)
    assert len(shards) == 8
    assert [shards[i].value.tolist() for i in range(8)] == [t.tolist() for t in tokens]
    assert shards.lengths().tolist() == [4, 9, 5, 30, 3, 12, 7, 20]
    assert shards[3].place == f"{folder}/shard-00001.arrow, row 1"
    view = encode(NumberTokenizer(), shards[3])
    assert not view.flags.owndata
    assert not view.flags.writeable


def test_prepared_documents_train_like_the_text_they_came_from(prepared, tmp_path):
    folder, _ = prepared
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text/a.jsonl", number_documents([4, 9, 5, 30, 3, 12, 7, 20]))
    text = iter(prepared_loader(tmp_path / "text", 1, 2))
    tokens = iter(prepared_loader(folder, 1, 2))
    for _ in range(20):
        assert fingerprint(next(tokens)) == fingerprint(next(text))


def test_a_shuffled_epoch_has_every_document_once_and_resumes(prepared):
    folder, _ = prepared
    more = {"documents__shuffle_seed": 7}
    ranks = [inner_tokens(prepared_loader(folder, r, 2, False, **more)) for r in range(2)]
    assert sorted(ranks[0] + ranks[1]) == list(range(10, 84))
    batches = iter(prepared_loader(folder, **more))
    shuffled = [fingerprint(next(batches)) for _ in range(30)]
    batches = iter(prepared_loader(folder))
    assert [fingerprint(next(batches)) for _ in range(30)] != shuffled
    first = prepared_loader(folder, **more)
    batches = iter(first)
    found = [fingerprint(next(batches)) for _ in range(11)]
    second = prepared_loader(folder, **more)
    second.load_state_dict(first.state_dict())
    batches = iter(second)
    assert found + [fingerprint(next(batches)) for _ in range(19)] == shuffled


def test_a_tokenizer_that_does_not_fit_is_refused(prepared, monkeypatch):
    folder, _ = prepared
    monkeypatch.setattr(NumberTokenizer, "eos_id", 3)
    with pytest.raises(ValueError, match="was prepared with the tokenizer elsewhere"):
        prepared_loader(folder)


def test_a_damaged_folder_is_refused(prepared):
    folder, _ = prepared
    shard = folder / "shard-00001.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(bytes(len(whole)))
    with pytest.raises(ValueError, match=r"shard-00001\.arrow: cannot be read \(Not an Arrow file"):
        prepared_loader(folder)
    shard.write_bytes(whole[:-8])
    with pytest.raises(ValueError, match=r"shard-00001\.arrow: missing, or not \d+ bytes long"):
        prepared_loader(folder)
    (folder / MANIFEST).write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=r"manifest\.json: format 'other' version None"):
        prepared_loader(folder)
    (folder / MANIFEST).rename(folder / "progress.json")
    with pytest.raises(ValueError, match="its preparation did not finish"):
        prepared_loader(folder)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--training.dataset", "smaple"],
            'training.dataset = "smaple": unknown dataset; allowed: ',
        ),
        (["--training.dataset", "local"], 'training.dataset_path = null: dataset is "local"'),
        (["--training.dataset_path", "x"], "dataset is 'sample', which has no path"),
        (["--training.text_column", "body"], 'training.text_column = "body": dataset'),
        (["--training.dataset_split", "x"], 'training.dataset_split = "x": dataset is'),
        (["--documents.shuffle_seed", "3"], "documents.shuffle_seed = 3: needs prepared documents"),
        (["--documents.shuffle_seed", "-3"], "documents.shuffle_seed = -3: out of range"),
        (["--documents.packing", "best"], "--documents.packing"),
        (
            ["--validation.enable", "--validation.dataset", "c5"],
            'validation.dataset = "c5": unknown dataset',
        ),
    ],
)
def test_impossible_settings_stop_the_run_before_it_starts(args, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        load_config(args, world_size=1)


def test_files_are_looked_into_before_the_run_starts(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["a truth", "a wife"])
    args = ["--training.dataset", "local", "--training.dataset_path", str(tmp_path / "a.jsonl")]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: column 'body' is missing"):
        load_config([*args, "--training.text_column", "body"], world_size=1)
    with pytest.raises(ValueError, match="2 documents are too few for a data-parallel degree of 4"):
        load_config(args, world_size=4)
    assert load_config(args, world_size=2).training.dataset == "local"
    (tmp_path / "a.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"training\.dataset: there is no document in it"):
        load_config(args, world_size=1)
