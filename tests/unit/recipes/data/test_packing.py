"""Packing and samples: what goes where, what is predicted, what is padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.data.labels import IGNORE, build_sample, collate, packing_stats
from recipes.data.packing import PADDING, BestFitPacker, ConcatPacker, Pending
from recipes.data.targets import are_targets, token_ids, with_targets


def document(first: int, length: int) -> np.ndarray:
    return np.arange(first, first + length, dtype=np.int32)


def pack(packer, documents):
    """All sequences of a finite data set."""
    packed = []
    for tokens in documents:
        packer.add(Pending(tokens))
        while (sequence := packer.pop()) is not None:
            packed.append(sequence)
    while (sequence := packer.pop(flush=True)) is not None:
        packed.append(sequence)
    return packed


def layout(packed):
    return [[p.tokens.tolist() for p in sequence.pieces] for sequence in packed]


def test_best_fit_keeps_documents_whole_and_fills_with_the_longest_that_fits():
    documents = [document(10, 5), document(20, 3), document(30, 2), document(40, 4)]
    assert layout(pack(BestFitPacker(8), documents)) == [
        [[10, 11, 12, 13, 14], [20, 21, 22]],
        [[30, 31], [40, 41, 42, 43]],
    ]


def test_best_fit_prefers_the_older_of_two_equally_long_documents():
    documents = [document(10, 6), document(20, 2), document(30, 2)]
    assert layout(pack(BestFitPacker(8), documents))[0][1] == [20, 21]


def test_best_fit_cuts_only_documents_that_are_too_long_and_lets_them_fill_the_rest():
    documents = [document(10, 5), document(20, 11), document(40, 4)]
    packed = pack(BestFitPacker(8), documents)
    # Nothing whole fits after the first five: the long one gives its head; 8 of it remain.
    assert layout(packed) == [
        [list(range(10, 15)), [20, 21, 22]],
        [list(range(23, 31))],
        [[40, 41, 42, 43]],
    ]
    assert [p.following for p in packed[0].pieces] == [None, 23]
    assert packed[1].pieces[0].following is None


def test_a_long_document_fills_a_gap_only_once():
    documents = [document(10, 6), document(20, 20), document(50, 6), document(60, 6)]
    packed = layout(pack(BestFitPacker(8), documents))
    assert packed[0] == [list(range(10, 16)), [20, 21]]
    assert packed[1:3] == [[list(range(22, 30))], [list(range(30, 38))]]
    assert packed[3:] == [[[38, 39], list(range(50, 56))], [list(range(60, 66))]]


def test_best_fit_waits_for_its_lookahead_and_holds_no_more():
    packer = BestFitPacker(seq_len=16384)  # looks ahead 8 sequences
    held = 0
    for _ in range(100):
        packer.add(Pending(document(0, 20000)))
        while packer.pop() is not None:
            pass
        held = max(held, sum(len(p.tokens) for p in packer.pending()))
    assert held < 8 * 16384


def test_small_data_is_not_read_over_and_over_before_the_first_sequence():
    packer = BestFitPacker(seq_len=8)
    for _ in range(3):
        packer.add(Pending(document(0, 4), epoch=0))
        assert packer.pop(epoch=0) is None
    packer.add(Pending(document(0, 4), epoch=1))
    assert packer.pop(epoch=1) is not None
    assert packer.pop(epoch=1) is not None


def test_concat_is_a_cut_every_seq_len_plus_one():
    packed = pack(ConcatPacker(4), [document(10, 7), document(20, 6)])
    assert layout(packed) == [[[10, 11, 12, 13]], [[15, 16], [20, 21]], [[23, 24, 25]]]
    assert [s.following for s in packed] == [14, 22, None]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), seq_len=st.integers(1, 17))
def test_best_fit_uses_every_token_once_and_predicts_every_one_but_the_first(lengths, seq_len):
    firsts = np.cumsum([0, *lengths[:-1]])
    documents = [document(f, n) for f, n in zip(firsts, lengths, strict=True)]
    inputs, pairs = [], []
    for packed in pack(BestFitPacker(seq_len), documents):
        sample = build_sample(packed, seq_len, mask=True)
        real = sum(len(p.tokens) for p in packed.pieces)
        assert (sample.labels[real:] == IGNORE).all()
        inputs += sample.input[:real].tolist()
        pairs += zip(sample.input.tolist(), sample.labels.tolist(), strict=True)
        assert sample.boundaries[0] == 0
        assert sample.boundaries[-1] == seq_len
    assert sorted(inputs) == list(range(sum(lengths)))
    expected = [(t, t + 1) for d in documents for t in d.tolist()[:-1]]
    assert sorted(p for p in pairs if p[1] != IGNORE) == expected
    # Only what exceeds a sequence was cut, and once more than it must be at most.
    packed = pack(BestFitPacker(seq_len), documents)
    pieces = [int(p.tokens[0]) for s in packed for p in s.pieces]
    for first, length in zip(firsts, lengths, strict=True):
        parts = sum(first <= p < first + length for p in pieces)
        assert parts == 1 if length <= seq_len else parts <= -(-length // seq_len) + 1


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    seq_len=st.integers(1, 17),
    stop=st.integers(0, 30),
    kind=st.sampled_from([BestFitPacker, ConcatPacker]),
)
def test_what_is_pending_continues_exactly(lengths, seq_len, stop, kind):
    documents = [document(100 * i, n) for i, n in enumerate(lengths)]
    whole = layout(pack(kind(seq_len), documents))
    first, second = kind(seq_len), kind(seq_len)
    packed = []
    for tokens in documents:
        first.add(Pending(tokens))
    for _ in range(min(stop, len(whole))):
        packed.append(first.pop(flush=True))
    for waiting in first.pending():
        second.add(waiting)
    packed += pack(second, [])
    reference = kind(seq_len)
    for tokens in documents:
        reference.add(Pending(tokens))
    assert layout(packed) == layout(pack(reference, []))


def masked_sample(mask: bool):
    packer = BestFitPacker(8)
    (packed,) = pack(packer, [np.array([1, 5, 6, 2], np.int32), np.array([1, 7, 2], np.int32)])
    return build_sample(packed, 8, mask)


def test_no_label_crosses_a_border_and_eos_is_the_last_target():
    sample = masked_sample(mask=True)
    assert sample.input.tolist() == [1, 5, 6, 2, 1, 7, 2, 0]
    assert sample.labels.tolist() == [5, 6, 2, IGNORE, 7, 2, IGNORE, IGNORE]
    assert sample.boundaries == [0, 4, 7, 8]  # padding is a document of its own


def test_without_mask_the_sequence_is_one_text():
    sample = masked_sample(mask=False)
    assert sample.labels.tolist() == [5, 6, 2, 1, 7, 2, IGNORE, IGNORE]


# Of the first, 5 is not learned; of the second its first token and EOS (99: ~99 is -100).
TURNS = [
    with_targets(np.array([1, 5, 6, 2]), np.array([True, False, True, True])),
    with_targets(np.array([99, 7, 99]), np.array([False, True, False])),
]


def test_targets_are_carried_in_the_ids():
    assert TURNS[1].tolist() == [-100, 7, -100]
    assert TURNS[1].dtype == np.int32
    assert token_ids(TURNS[1]).tolist() == [99, 7, 99]
    assert are_targets(TURNS[0]).tolist() == [True, False, True, True]
    for kind in (np.uint16, np.uint32, np.int64):
        tokens = with_targets(np.array([0, 40_000, 3], kind), np.array([False, False, True]))
        assert tokens.tolist() == [-1, -40_001, 3]
        assert token_ids(tokens).tolist() == [0, 40_000, 3]


@pytest.mark.parametrize("kind", [BestFitPacker, ConcatPacker])
@pytest.mark.parametrize("mask", [True, False])
def test_what_is_not_learned_is_an_input_and_no_label(kind, mask):
    (packed,) = pack(kind(8), TURNS)
    sample = build_sample(packed, 8, mask)
    assert sample.input.tolist() == [1, 5, 6, 2, 99, 7, 99, 0]
    # Across the border would stand 99, which is not learned.
    assert sample.labels.tolist() == [IGNORE, 6, 2, IGNORE, 7, IGNORE, IGNORE, IGNORE]


@pytest.mark.parametrize("mask", [True, False])
def test_the_target_after_a_cut_may_be_none(mask):
    """The document goes on with 99, unlearned, in the next sequence: its id looks like no label."""
    document = np.concatenate([TURNS[1], TURNS[1]])
    for kind, labels in (
        (BestFitPacker, [[7, IGNORE, IGNORE], [7, IGNORE, IGNORE]]),
        (ConcatPacker, [[7, IGNORE, IGNORE], [IGNORE] * 3]),
    ):
        samples = [build_sample(packed, 3, mask) for packed in pack(kind(3), [document])]
        assert [sample.labels.tolist() for sample in samples] == labels
    (first, _) = pack(BestFitPacker(3), [np.array([1, 5, ~99, 7], np.int32)])
    assert build_sample(first, 3, mask).labels.tolist() == [5, IGNORE, 7]
    # At the border of two documents mask = false learns what follows, if it is learned.
    (packed,) = pack(BestFitPacker(6), [TURNS[0][:3], TURNS[0][2:]])
    expected = [IGNORE, 6, IGNORE if mask else 6, 2, IGNORE, IGNORE]
    assert build_sample(packed, 6, mask).labels.tolist() == expected


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
    seq_len=st.integers(2, 17),
    data=st.data(),
)
def test_every_learned_token_but_the_first_is_a_target_once(lengths, seq_len, data):
    firsts = np.cumsum([0, *lengths[:-1]])
    ids = [document(f, n) for f, n in zip(firsts, lengths, strict=True)]
    flags = [np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) for n in lengths]
    documents = [with_targets(i, f) for i, f in zip(ids, flags, strict=True)]
    targets = []
    for packed in pack(BestFitPacker(seq_len), documents):
        labels = build_sample(packed, seq_len, mask=True).labels
        targets += labels[labels != IGNORE].tolist()
    assert sorted(targets) == [
        t for i, f in zip(ids, flags, strict=True) for t in i[1:][f[1:]].tolist()
    ]


def test_labels_are_the_inputs_shifted():
    """Exactly seq_len inputs and labels; label[i] == input[i + 1] wherever there is one."""
    (packed, *_) = pack(ConcatPacker(16), [document(1, 40)])
    sample = build_sample(packed, 16, mask=True)
    assert sample.input.shape == sample.labels.shape == (16,)
    assert torch.equal(sample.labels[:-1], sample.input[1:])
    assert sample.labels[-1] == 17


@pytest.mark.parametrize(("documents", "width"), [(1, 8), (6, 8), (7, 16), (100, 128)])
def test_boundaries_come_in_few_widths(documents, width):
    (packed,) = pack(BestFitPacker(256), [document(i, 2) for i in range(documents)])
    sample = build_sample(packed, 256, mask=True)
    inputs, labels = collate([sample, build_sample(PADDING, 256, mask=True)])
    assert inputs["boundaries"].shape == (2, width)
    assert inputs["boundaries"][1].tolist() == [0] + [256] * (width - 1)
    assert inputs["boundaries"].dtype == inputs["input"].dtype == labels.dtype == torch.int64


def test_stats_count_documents_and_padding():
    full = pack(BestFitPacker(8), [document(1, 5), document(1, 3)])
    first, padding = (build_sample(packed, 8, mask=True) for packed in (full[0], PADDING))
    inputs, labels = collate([first, masked_sample(mask=True), padding])
    assert packing_stats(inputs["boundaries"], inputs["input"], labels) == {
        "documents": 4 / 3,
        "longest_document": 5,
        "padding_share": 9 / 24,
    }


def test_a_last_document_that_is_not_learned_is_no_padding():
    nothing = with_targets(document(1, 3), np.zeros(3, bool))
    (packed,) = pack(BestFitPacker(8), [document(1, 5), nothing])
    inputs, labels = collate([build_sample(packed, 8, mask=True)])
    assert packing_stats(inputs["boundaries"], inputs["input"], labels)["padding_share"] == 0
