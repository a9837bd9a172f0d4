"""Loaders: the same order for any number of workers, exact resume, refusals."""

import io
import json
import logging
import tracemalloc

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from recipes.data.dataset import build_dataloader, build_validation_dataloader
from recipes.data.loader import DocumentLoader
from recipes.data.records import Row
from recipes.data.streams import Member
from recipes.preflight.data import check_checkpoint_position
from tests.helpers.documents import NumberTokenizer, fingerprint, job, number_documents, write_jsonl

LENGTHS = [30, 5, 12, 90, 7, 7, 41, 16, 3, 25, 64, 10, 33, 8, 19, 70]


@pytest.fixture
def files(tmp_path):
    texts = number_documents(LENGTHS)
    write_jsonl(tmp_path / "a.jsonl", texts[:6])
    write_jsonl(tmp_path / "b.jsonl", texts[6:])
    return str(tmp_path)


def settings(path, **more):
    return job(
        training__dataset="local",
        training__dataset_path=path,
        training__seq_len=16,
        training__local_batch_size=2,
        **more,
    )


def loader(path, rank=0, degree=1, infinite=True, **more):
    return build_dataloader(degree, rank, NumberTokenizer(), settings(path, **more), infinite)


def take(batches, count):
    return [fingerprint(next(batches)) for _ in range(count)]


def round_trip(state):
    """A state as a checkpoint keeps it, read with pickle's dangerous part switched off."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("packing", ["pack", "concat"])
def test_the_order_does_not_depend_on_the_number_of_workers(files, packing):
    expected = take(iter(loader(files, documents__packing=packing)), 60)
    assert len(set(expected)) > 20
    for workers in (1, 2, 5):
        found = loader(files, documents__packing=packing, training__dataloader__num_workers=workers)
        assert take(iter(found), 60) == expected


@pytest.mark.parametrize("packing", ["pack", "concat"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 3), (9, 4), (14, 30)])
def test_a_run_resumed_twice_continues_exactly(files, packing, workers, first, second):
    """In the middle of documents and epochs, and after wrapping: an epoch is about 14 batches."""
    more = {"documents__packing": packing, "training__dataloader__num_workers": workers}
    expected = take(iter(loader(files, **more)), first + second + 20)
    state = None
    found = []
    for count in (first, second, 20):
        part = loader(files, **more)
        if state is not None:
            part.load_state_dict(state)
        found += take(iter(part), count)
        state = round_trip(part.state_dict())
    assert found == expected
    assert part.epoch == (first + second + 20) // 14


def test_resume_may_change_the_number_of_workers(files):
    expected = take(iter(loader(files, training__dataloader__num_workers=3)), 12)
    first = loader(files)
    assert take(iter(first), 5) == expected[:5]
    second = loader(files, training__dataloader__num_workers=2)
    second.load_state_dict(first.state_dict())
    assert take(iter(second), 7) == expected[5:]


@pytest.mark.parametrize("packing", ["pack", "concat"])
@pytest.mark.parametrize(("before", "after"), [(16, 40), (40, 16)])
def test_resume_at_another_length_neither_skips_nor_repeats(files, packing, before, after):
    """Every token once in an epoch, though its sequences have two lengths."""

    def part(seq_len):
        config = settings(files, documents__packing=packing)
        config.training.seq_len = seq_len
        return build_dataloader(1, 0, NumberTokenizer(), config, infinite=False)

    first, second = part(before), part(after)
    batches = iter(first)
    seen = [next(batches) for _ in range(3)]
    second.load_state_dict(round_trip(first.state_dict()))
    seen += list(second)
    assert {inputs["input"].shape[1] for inputs, _ in seen} == {before, after}
    tokens = [t for inputs, _ in seen for t in inputs["input"].flatten().tolist() if t >= 10]
    targets = [t for _, labels in seen for t in labels.flatten().tolist() if t >= 10]
    everything = list(range(10, 10 + sum(LENGTHS) - 2 * len(LENGTHS)))
    # Concatenated sequences overlap: the last target of one is no input of the next.
    assert sorted(tokens if packing == "pack" else set(tokens) | set(targets)) == everything
    assert len(targets) == len(set(targets))


def test_iter_starts_anew_except_after_load_state_dict(files):
    part = loader(files)
    expected = take(iter(part), 4)
    assert take(iter(part), 4) == expected
    state = part.state_dict()
    part.load_state_dict(state)
    assert take(iter(part), 4) != expected
    assert take(iter(part), 4) == expected


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_every_document_is_read_by_exactly_one_rank(files, degree):
    seen = []
    for rank in range(degree):
        for inputs, labels in loader(files, rank, degree, infinite=False):
            assert inputs["input"].shape == labels.shape == (2, 16)
            seen += [t for t in inputs["input"].flatten().tolist() if t >= 10]
    assert sorted(seen) == list(range(10, 10 + sum(LENGTHS) - 2 * len(LENGTHS)))


def test_validation_sees_the_same_batches_every_round(files):
    config = job(
        validation__dataset="local",
        validation__dataset_path=files,
        validation__seq_len=16,
        validation__local_batch_size=3,
    )
    part = build_validation_dataloader(1, 0, NumberTokenizer(), config)
    rounds = [[fingerprint(batch) for batch in part] for _ in range(2)]
    assert rounds[0] == rounds[1]
    # 440 tokens; all rows are full sequences or padding, and all batches have three.
    assert len(rounds[0]) == 10


@pytest.mark.parametrize("packing", ["pack", "concat"])
@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize("degree", [2, 3, 25])
def test_validation_has_the_same_sequences_at_every_degree(files, packing, mask, degree):
    """Also of documents that are cut, and with more ranks than documents."""
    config = job(
        validation__dataset="local",
        validation__dataset_path=files,
        validation__seq_len=16,
        validation__local_batch_size=1,
        documents__packing=packing,
        documents__mask=mask,
    )
    alone = [fingerprint(b) for b in build_validation_dataloader(1, 0, NumberTokenizer(), config)]
    ranks = [
        list(build_validation_dataloader(degree, rank, NumberTokenizer(), config))
        for rank in range(degree)
    ]
    # All ranks have equally many batches, the last ones of padding.
    dealt = [batch for step in zip(*ranks, strict=True) for batch in step]
    assert [fingerprint(batch) for batch in dealt[: len(alone)]] == alone
    assert len(dealt) - len(alone) < degree
    assert all((labels == -100).all() for _, labels in dealt[len(alone) :])


@pytest.mark.parametrize("training", ["local", "sample"])
@pytest.mark.parametrize("validation", ["local", "sample"])
def test_validation_on_the_bundled_novels_is_said(files, caplog, training, validation):
    """Where nothing else is named, and training reads other data."""
    config = job(training__dataset=training, validation__dataset=validation)
    config.training.seq_len = config.validation.seq_len = 16
    config.validation.local_batch_size = 1
    for data in (config.training, config.validation):
        data.dataset_path = files if data.dataset == "local" else None
    with caplog.at_level(logging.WARNING):
        build_validation_dataloader(1, 0, NumberTokenizer(), config)
    expected = 'validation.dataset = "sample", its default: it measures on the bundled novels'
    said = [record.message.startswith(expected) for record in caplog.records]
    assert said == ([True] if (training, validation) == ("local", "sample") else [])


def test_a_column_of_another_name(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["5 6 7"], column="body")
    (inputs, _), *_ = loader(str(tmp_path), infinite=False, training__text_column="body")
    assert inputs["input"][0, :5].tolist() == [1, 5, 6, 7, 2]
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: column 'text' is missing"):
        loader(str(tmp_path))


def test_too_few_documents_for_the_ranks(files):
    with pytest.raises(
        ValueError, match="16 documents are too few for a data-parallel degree of 17"
    ):
        loader(files, 0, 17)


def test_a_bad_document_further_on_stops_training_with_its_place(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["5 6 7", " ", "8"])
    for workers in (0, 2):
        part = loader(str(tmp_path), training__dataloader__num_workers=workers)
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the document is empty"):
            next(iter(part))


def test_other_documents_are_refused_on_resume(files, tmp_path):
    part = loader(files)
    next(iter(part))
    state = part.state_dict()
    write_jsonl(tmp_path / "c.jsonl", ["5 6"])
    with pytest.raises(ValueError, match=r"other documents.*exclude_from_loading"):
        loader(files).load_state_dict(state)


@pytest.fixture
def checkpoint(files, tmp_path):
    """A checkpoint of two data-parallel ranks, and the settings of the run that resumes it."""
    states = [loader(files, rank, 2).state_dict() for rank in range(2)]
    dcp.save(
        {"dataloader": states[0] | states[1]}, checkpoint_id=tmp_path / "out/checkpoint/step-4"
    )
    return settings(files, job__dump_folder=str(tmp_path / "out"), checkpoint__enable=True)


@pytest.mark.parametrize("degree", [1, 4])
def test_another_data_parallel_degree_is_refused_by_name(checkpoint, degree):
    message = (
        rf"step-4: the checkpoint was saved at data-parallel degree 2, this run has {degree}: "
        r".*exclude_from_loading"
    )
    with pytest.raises(ValueError, match=message):
        check_checkpoint_position(checkpoint, degree)


def test_the_same_degree_loads_and_leaving_the_data_out_is_a_way_on(checkpoint):
    check_checkpoint_position(checkpoint, 2)
    part = build_dataloader(2, 1, NumberTokenizer(), checkpoint)
    dcp.load({"dataloader": part}, checkpoint_id=f"{checkpoint.job.dump_folder}/checkpoint/step-4")
    checkpoint.checkpoint.exclude_from_loading = ["dataloader"]
    check_checkpoint_position(checkpoint, 4)


def test_a_state_of_another_degree_is_refused_without_a_checkpoint_too(files):
    state = loader(files, 0, 2).state_dict()
    with pytest.raises(ValueError, match="saved at data-parallel degree 2, this run has 1"):
        loader(files).load_state_dict(state)


def test_a_checkpoint_of_torchtitans_loader_is_refused(files, tmp_path):
    dcp.save(
        {"dataloader": {"dp_rank_0": b"pickled", "world_size": 1}},
        checkpoint_id=tmp_path / "out/checkpoint/step-4",
    )
    config = settings(files, job__dump_folder=str(tmp_path / "out"), checkpoint__enable=True)
    with pytest.raises(ValueError, match="written by another data loader"):
        check_checkpoint_position(config, 1)


class Endless:
    """Documents of 40,000 tokens, each made when it is read."""

    identity = "endless"

    def documents(self, epoch, cursor, rank, degree):
        for i in range(500):
            yield {"document": i}, Row("endless", i + 1, 0, np.full(40_000, i, np.int32))


@pytest.mark.parametrize("workers", [0, 2])
def test_memory_does_not_grow_with_the_data(workers):
    """80 MB of tokens pass; sequences of 65,536 look 8 ahead, which is 2 MB."""
    part = DocumentLoader(
        [Member(Endless(), repeat=False)],
        NumberTokenizer(),
        dp_rank=0,
        dp_degree=1,
        vocab_size=2048,
        seq_len=65536,
        batch_size=1,
        packing="pack",
        mask=True,
        num_workers=workers,
    )
    tracemalloc.start()
    batches = sum(1 for _ in part)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert batches >= 20_000_000 // 65536
    assert peak < 16e6


def test_the_state_is_plain_and_small(files):
    part = loader(files)
    take(iter(part), 3)
    state = part.state_dict()
    assert state["dp_degree"] == 1
    place = json.loads(state["dp_rank_0"]["place"])
    (stream,) = place["state"]["streams"]
    assert len(state["dp_rank_0"]["tokens"]) == 4 * sum(n for n, _, _ in stream["pending"])
