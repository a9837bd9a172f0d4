"""Mixtures: shares of tokens, exact resume, sources that end, what is left out and cut."""

import json
import logging
from itertools import pairwise

import numpy as np
import pytest

from recipes.data.dataset import build_dataloader
from recipes.data.loader import DocumentLoader
from recipes.data.records import Row
from recipes.data.streams import Member
from tests.helpers.documents import NumberTokenizer, fingerprint, job, number_documents, write_jsonl

SEQ_LEN = 512


class Made:
    """Documents of about `mean` tokens, each of which is `token`; as many as wanted."""

    def __init__(self, mean, token, count=10**9):
        self.mean, self.token, self.count = mean, token, count
        self.identity = f"made {mean} {token}"

    def documents(self, epoch, cursor, rank, degree):
        for i in range(cursor["document"] if cursor else rank, self.count, degree):
            length = np.random.default_rng([self.token, i]).integers(self.mean // 2, 2 * self.mean)
            ids = np.full(length, self.token, np.int32)
            yield {"document": i + degree}, Row("made", i + 1, 0, ids)


# Lengths a hundredfold apart; 100,000 tokens are cut into 200 sequences.
MEANS, WEIGHTS = (10, 1_000, 100_000), (0.5, 0.3, 0.2)


def members(**more):
    return [
        Member(Made(mean, token), str(mean), weight, **more)
        for token, (mean, weight) in enumerate(zip(MEANS, WEIGHTS, strict=True), 10)
    ]


def loader(sources, rank=0, degree=1, **more):
    more = {"vocab_size": 2048, **more}
    settings = {"seq_len": SEQ_LEN, "batch_size": 1, "packing": "pack", "mask": True, **more}
    return DocumentLoader(sources, NumberTokenizer(), dp_rank=rank, dp_degree=degree, **settings)


def token_counts(batch, tokens=(10, 11, 12)):
    """How many tokens of each source a batch has."""
    inputs, _ = batch
    return [int((inputs["input"] == token).sum()) for token in tokens]


def windows(degree, sequences, **more):
    """Shares of tokens in every window of a thousand sequences: (windows, sources)."""
    ranks = [iter(loader(members(), rank, degree, **more)) for rank in range(degree)]
    counts = [token_counts(next(ranks[i % degree])) for i in range(sequences)]
    sums = np.cumsum([[0] * len(MEANS), *counts], axis=0)
    inside = sums[1000:] - sums[:-1000]
    return inside / inside.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("packing", ["pack", "concat"])
@pytest.mark.parametrize(
    ("degree", "most"), [(1, 0.002), (2, 0.003), (8, 0.005), (32, 0.01), (64, 0.015)]
)
def test_shares_of_tokens_hold_in_every_thousand_sequences(packing, degree, most):
    shares = windows(degree, 1600, packing=packing)
    assert np.abs(shares - WEIGHTS).max() < most


def test_shares_hold_though_one_source_packs_badly():
    """Documents of two thirds of a sequence leave a third of it to padding: it does not count."""

    class TwoThirds(Made):
        def documents(self, epoch, cursor, rank, degree):
            for i in range(cursor["document"] if cursor else rank, self.count, degree):
                ids = np.full(340, self.token, np.int32)
                yield {"document": i + degree}, Row("made", i + 1, 0, ids)

    sources = [Member(TwoThirds(340, 10), "a"), Member(Made(10, 11), "b")]
    batches = iter(loader(sources))
    counts = np.sum([token_counts(next(batches), (10, 11)) for _ in range(1000)], axis=0)
    assert counts / counts.sum() == pytest.approx([0.5, 0.5], abs=0.002)


def test_shares_across_sources():
    """Of documents that fit into a sequence; the packer looks 8 sequences ahead."""
    sources = [
        Member(Made(m, t), str(m), w) for m, t, w in ((100, 10, 3), (900, 11, 1), (4000, 12, 1))
    ]
    batches = iter(loader(sources, across=True, seq_len=8192))
    counts = np.array([token_counts(next(batches)) for _ in range(1000)])
    assert counts.sum(axis=0) / counts.sum() == pytest.approx([0.6, 0.2, 0.2], abs=0.01)
    assert ((counts > 0).sum(axis=1) > 1).mean() > 0.5
    batches = iter(loader(sources, seq_len=8192))
    within = np.array([token_counts(next(batches)) for _ in range(50)])
    assert ((within > 0).sum(axis=1) == 1).all()


@pytest.fixture
def files(tmp_path):
    """Three files of a mixture; no token occurs twice in all of them."""
    texts = number_documents([30, 5, 12, 9, 7, 41, 16, 25, 33, 8, 150, 90])
    parts = {"short": texts[:5], "middle": texts[5:10], "long": texts[10:]}
    return [str(write_jsonl(tmp_path / f"{name}.jsonl", part)) for name, part in parts.items()]


def settings(files, entries=({}, {}, {}), **more):
    from recipes.config.schema import MixtureSource

    weights = (0.5, 0.3, 0.2)
    mixture = [
        MixtureSource(**{"dataset": "local", "dataset_path": path, "weight": weight, **entry})
        for path, weight, entry in zip(files, weights, entries, strict=True)
    ]
    defaults = {"training__seq_len": 16, "training__local_batch_size": 2}
    return job(training__mixture=mixture, **{**defaults, **more})


def of(config, rank=0, degree=1, infinite=True):
    return build_dataloader(degree, rank, NumberTokenizer(), config, infinite)


def take(batches, count):
    return [fingerprint(next(batches)) for _ in range(count)]


@pytest.mark.parametrize("mixing", ["within", "across"])
@pytest.mark.parametrize("packing", ["pack", "concat"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_twice_continues_exactly(files, mixing, packing, workers):
    """In the middle of documents, epochs, and after a source has ended."""
    config = settings(
        files,
        ({}, {"when_used_up": "stop"}, {"seq_len": 10}),
        training__mixture_packing=mixing,
        documents__packing=packing,
        training__dataloader__num_workers=workers,
    )
    expected = take(iter(of(config, 1, 2)), 60)
    state, found = None, []
    for count in (7, 13, 40):
        part = of(config, 1, 2)
        if state is not None:
            part.load_state_dict(json.loads(json.dumps(state, default=list), object_hook=untuple))
        found += take(iter(part), count)
        state = part.state_dict()
    assert found == expected
    given = part.given
    assert given["short"].epoch >= 2
    assert given["middle"].tokens < given["long"].tokens
    config.training.dataloader.num_workers = 3
    assert take(iter(of(config, 1, 2)), 60) == expected


def untuple(value):
    return {k: bytes(v) if k == "tokens" else v for k, v in value.items()}


def test_weights_and_names_may_change_on_resume(files):
    """Every source goes on where it stood; only what is drawn next follows the new weights."""
    part = of(settings(files))
    batches = iter(part)
    take(batches, 5)
    state = part.state_dict()
    before = part.given
    other = of(settings(files, ({"weight": 0.0001}, {"name": "new"}, {})))
    other.load_state_dict(state)
    assert other.state_dict() == state
    batches = iter(other)
    take(batches, 100)
    gained = {
        n: other.given[n].tokens - before[o].tokens
        for n, o in (("short", "short"), ("new", "middle"), ("long", "long"))
    }
    assert gained["short"] <= 16
    assert gained["new"] / gained["long"] == pytest.approx(1.5, rel=0.05)


def test_another_mixture_is_refused_on_resume(files):
    state = of(settings(files)).state_dict()
    for config in (
        settings(files[::-1]),
        settings(files, training__mixture_packing="across"),
        job(training__dataset="local", training__dataset_path=files[0]),
    ):
        with pytest.raises(ValueError, match="another mixture or order of sources"):
            of(config).load_state_dict(state)


def test_a_mixture_of_one_reads_as_its_source_alone(files):
    config = settings(files)
    del config.training.mixture[1:]
    alone = job(
        training__dataset="local",
        training__dataset_path=files[0],
        training__seq_len=16,
        training__local_batch_size=2,
    )
    part, plain = of(config), of(alone)
    assert take(iter(part), 20) == take(iter(plain), 20)
    assert part.state_dict() == plain.state_dict()


def test_a_source_that_stops_leaves_its_share_to_the_others(files, caplog):
    config = settings(files, ({}, {"when_used_up": "stop"}, {"weight": 0.5}))
    part = of(config)
    with caplog.at_level(logging.INFO):
        take(iter(part), 100)
    given = part.given
    assert given["middle"].tokens == 41 + 16 + 25 + 33 + 8
    assert given["short"].tokens / given["long"].tokens == pytest.approx(1, abs=0.02)
    said = [r.message for r in caplog.records]
    assert sum("middle: used up after 123 tokens" in line for line in said) == 1
    assert "short: data-parallel rank 0 begins epoch 1" in said
    config.training.mixture[1].when_used_up = "repeat"
    again = of(config)
    again.load_state_dict(part.state_dict())
    take(iter(again), 50)
    assert again.given["middle"].tokens > given["middle"].tokens


@pytest.mark.parametrize("mixing", ["within", "across"])
def test_every_token_once_where_all_stop(files, mixing):
    part = of(settings(files, training__mixture_packing=mixing), infinite=False)
    tokens = [t for inputs, _ in part for t in inputs["input"].flatten().tolist() if t >= 10]
    assert sorted(tokens) == list(range(10, max(tokens) + 1))
    assert sum(given.tokens for given in part.given.values()) == len(tokens) + 2 * 12


def test_documents_are_left_out_and_cut_by_length(files):
    entries = ({"min_tokens": 9, "max_tokens": 12}, {"min_tokens": 26}, {"seq_len": 7})
    part = of(settings(files, entries, training__seq_len=21), infinite=False)
    lengths: dict[str, list[int]] = {}
    for inputs, labels in part:
        for row, borders, targets in zip(
            inputs["input"], inputs["boundaries"].tolist(), labels, strict=True
        ):
            for start, end in pairwise(borders):
                if end > start and row[start]:
                    lengths.setdefault(source_of(int(row[start:end].max())), []).append(end - start)
                    assert targets[end - 1] == -100 or end == 21
    # EOS alone may have been cut off a long document.
    assert sorted(n for n in lengths["short"] if n > 1) == [9, 12]
    assert sorted(lengths["long"]) == sorted([7] * 33 + [3, 6])
    assert sum(n for n in lengths["middle"] if n > 1) in (41 + 33, 41 + 33 - 1)


def source_of(token):
    """By the greatest token of a piece; a document has two tokens less than its length."""
    return "short" if token < 10 + 53 else "middle" if token < 10 + 53 + 113 else "long"


def test_a_filter_that_leaves_nothing_does_not_go_on_for_ever(files):
    part = of(settings(files, ({"min_tokens": 1000}, {}, {})))
    with pytest.raises(ValueError, match=r"short: .* max_tokens or .* leave all of them out"):
        take(iter(part), 10)
