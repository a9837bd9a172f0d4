"""Samples as their papers define them, and the arithmetic of the measures."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from recipes.data.sources import FileSource
from recipes.data.tokens import Tokenizer
from recipes.evaluation import results as report
from recipes.evaluation.evaluator import Case, lengths_of, list_cases, summarize_tasks
from recipes.evaluation.haystack import Encoder, Haystack, insert
from recipes.evaluation.scorer import Scores
from recipes.evaluation.tasks import TASKS, Sample
from recipes.evaluation.text import TextScores, buckets, score_text, summarize, windows
from recipes.preflight import load_config
from tests import ROOT

CORPUS = ROOT / "assets" / "corpus" / "austen.jsonl.gz"
LENGTH = 400


@pytest.fixture(scope="module")
def encode() -> Encoder:
    return Encoder(Tokenizer("assets/tokenizer"))


@pytest.fixture(scope="module")
def hay(encode: Encoder) -> Haystack:
    return Haystack(encode, FileSource(str(CORPUS), "text"), count=2000)


def make(task: str, encode: Encoder, hay: Haystack, depth: float, seed: int = 0) -> Sample:
    return TASKS[task][0](encode, hay, np.random.default_rng(seed), LENGTH, depth)


@pytest.mark.parametrize("task", TASKS)
def test_samples_have_the_length_asked_for_and_begin_with_bos(
    task: str, encode: Encoder, hay: Haystack
) -> None:
    for depth in (0.0, 0.4, 1.0):
        sample = make(task, encode, hay, depth)
        assert sample.tokens.shape == (LENGTH,)
        assert sample.tokens.dtype == np.int64
        assert sample.tokens[0] == encode.tokenizer.bos_id
        assert len(sample.answer) >= 3


@pytest.mark.parametrize("missing", [0, 1])
def test_texts_that_repeat_are_announced(
    encode: Encoder, tmp_path: Path, caplog: pytest.LogCaptureFixture, missing: int
) -> None:
    (tmp_path / "short.txt").write_text("The sky is blue. The sun is yellow.")
    source = FileSource(str(tmp_path / "short.txt"), "text")
    tokens = len(encode("The sky is blue. The sun is yellow."))
    with caplog.at_level(logging.WARNING):
        Haystack(encode, source, count=tokens + missing)
    said = [record.message for record in caplog.records]
    assert len(said) == missing
    for line in said:
        assert line.startswith(f"evaluation.dataset has {tokens} tokens, {tokens + 1} are wanted")


@pytest.mark.parametrize("task", ["passkey", "needle", "multikey"])
def test_the_answer_stands_in_the_text_at_its_depth(
    task: str, encode: Encoder, hay: Haystack
) -> None:
    for depth in (0.0, 0.5, 1.0):
        sample = make(task, encode, hay, depth)
        answer = encode.text(sample.tokens[sample.answer]).strip()
        assert answer.isdigit()
        text = encode.text(sample.tokens)
        first = text.index(answer)
        assert first < len(text) - len(answer) - 50  # not the answer itself
        # The question takes a part at the end, and the first words one at the beginning.
        assert first / len(text) == pytest.approx(0.1 + 0.6 * depth, abs=0.25)


def test_multikey_hides_three_other_numbers(encode: Encoder, hay: Haystack) -> None:
    text = encode.text(make("multikey", encode, hay, 0.3).tokens)
    assert text.count("One of the special magic numbers for") == 4
    question = text[text.index("What is the special magic number for") :]
    key = question.split(" for ")[1].split(" mentioned")[0]
    assert text.count(f"numbers for {key} is:") == 1


def test_multivalue_asks_for_all_four_numbers_of_one_word(encode: Encoder, hay: Haystack) -> None:
    sample = make("multivalue", encode, hay, 0.0)
    text = encode.text(sample.tokens)
    needles = [part.split(".")[0] for part in text.split(" is: ")[1:]]
    assert len(needles) == 4
    assert text.endswith(f" {', '.join(needles[:3])}, and {needles[3]}")
    assert encode.text(sample.tokens[sample.answer]).replace(" ", "") == "".join(needles)


def test_copy_repeats_itself(encode: Encoder, hay: Haystack) -> None:
    sample = make("copy", encode, hay, 0.0)
    half = (LENGTH - 1) // 2
    first, second = sample.tokens[1 : 1 + half], sample.tokens[1 + half : 1 + 2 * half]
    assert np.array_equal(first, second)
    assert sample.answer[0] > half
    assert sample.answer[-1] == 2 * half


def test_needles_stand_at_the_ends_of_sentences(encode: Encoder) -> None:
    hay = encode("The sky is blue. The sun is yellow. Here we go.")
    text = encode.text(insert(encode, hay, [(0.6, encode(" NEEDLE!"))]))
    assert text == "The sky is blue. NEEDLE! The sun is yellow. Here we go."
    ends = [(0.0, encode("A. ")), (1.0, encode(" Z."))]
    assert encode.text(insert(encode, hay, ends)) == f"A. {encode.text(hay)} Z."


def test_a_length_without_room_is_refused(encode: Encoder, hay: Haystack) -> None:
    with pytest.raises(ValueError, match=r'evaluation.lengths: 60 tokens are too few.*"needle"'):
        TASKS["needle"][0](encode, hay, np.random.default_rng(0), 60, 0.5)


@pytest.mark.parametrize(("length", "short"), [(100, 20), (97, 16), (21, 20), (26, 20), (64, 1)])
def test_windows_give_every_far_token_the_short_context(length: int, short: int) -> None:
    starts, width, first = windows(length, short)
    context = np.full(length, -1)
    for start in starts:
        assert 0 <= start <= length - width
        for token in range(start + first, start + width):
            context[token] = token - start
    assert (context[:short] == -1).all()
    assert (context[short:] >= short).all()
    assert (context[short:] <= short + max(short // 4, 1)).all()


def test_no_window_where_all_context_is_short() -> None:
    assert windows(20, 20)[0] == []


class CountingScorer:
    """The log-probability of a token is its number of predecessors in what it was given with."""

    def __call__(self, tokens: np.ndarray) -> Scores:
        logprob = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.float32), tokens.shape)
        return Scores(logprob, np.zeros(tokens.shape, dtype=bool))


def test_short_scores_come_from_windows() -> None:
    scorer: Any = CountingScorer()
    scores = score_text(scorer, np.arange(50), short_context=16)
    assert np.array_equal(scores.full, np.arange(50))
    assert np.isnan(scores.short[:16]).all()
    assert ((scores.short[16:] >= 16) & (scores.short[16:] <= 20)).all()


def test_gain_and_longppl_by_hand() -> None:
    full = np.array([0, -1.0, -0.5, -3.0, -1.5, -1.0], dtype=np.float32)
    short = np.array([np.nan, np.nan, -3.0, -9.0, -3.0, -3.5], dtype=np.float32)
    result = summarize([TextScores(full, short)], short_context=2)
    assert result["loss"] == pytest.approx(7.0 / 5)
    assert result["gain"] == pytest.approx((2.5 + 6.0 + 1.5 + 2.5) / 4)
    # Key: gained more than 2 and end above -2, which are tokens 2 and 5.
    assert result["key_tokens"] == 2
    assert result["longppl"] == pytest.approx(math.exp((0.5 + 1.0) / 2))


def test_loss_by_position_averages_back_to_the_loss() -> None:
    assert buckets(100) == [(1, 32), (32, 64), (64, 100)]
    dice = np.random.default_rng(0)
    texts = [TextScores(dice.normal(size=100), np.full(100, np.nan)) for _ in range(3)]
    result = summarize(texts, short_context=100)
    weights = [b["last"] - b["first"] + 1 for b in result["positions"]]
    losses = [b["loss"] for b in result["positions"]]
    assert sum(weights) == 99
    assert np.average(losses, weights=weights) == pytest.approx(result["loss"])
    assert result["gain"] is None
    assert result["longppl"] is None


def test_cells_of_the_grid() -> None:
    cases = [Case("needle", 64, depth, ()) for depth in (0.0, 0.0, 1.0)]
    cells = summarize_tasks(cases, [(1.0, -0.5), (0.5, -1.5), (0.0, -4.0)])["needle"]
    assert cells[0] == {
        **{"length": 64, "depth": 0.0, "samples": 2},
        **{"exact": 0.5, "accuracy": 0.75, "logprob": -1.0},
    }
    assert (cells[1]["depth"], cells[1]["accuracy"]) == (1.0, 0.0)


def test_heat_map_has_a_panel_for_every_task_with_depths(tmp_path: Path) -> None:
    cell = {"samples": 1, "exact": 1.0, "accuracy": 0.5, "logprob": -1.0}
    grid = [{"length": n, "depth": d, **cell} for n in (64, 128) for d in (0.0, 1.0)]
    flat = [{"length": n, "depth": None, **cell} for n in (64, 128)]
    result = {"lengths": [64, 128], "depths": [0.0, 1.0], "tasks": {"needle": grid, "copy": flat}}
    figure = report.draw(result)
    assert figure is not None
    assert [axes.get_title() for axes in figure.axes] == ["needle", ""]  # and the colour bar
    with SummaryWriter(str(tmp_path)) as writer:
        files = report.write(result, tmp_path, step=7, writer=writer)
    assert [file.name for file in files] == ["step-7.json", "step-7.png"]
    assert all(file.stat().st_size > 100 for file in files)
    assert report.draw({**result, "tasks": {"copy": flat}}) is None


def test_no_result_is_overwritten(tmp_path: Path) -> None:
    """Each of other weights has files and a TensorBoard run of its own, whatever their order."""
    cell = {"length": 64, "depth": 0.0, "samples": 1, "exact": 1.0, "accuracy": 0.5}
    results = [
        {"weights": name, "lengths": [64], "depths": [0.0], "tasks": {"needle": [cell | value]}}
        for name, value in (("a", {"logprob": -1.0}), ("b", {"logprob": -2.0}))
    ]
    with SummaryWriter(str(tmp_path)) as writer:
        names = [
            report.write(result, tmp_path, step, writer)[0].name
            for step, result in ((0, results[0]), (0, results[1]), (5, results[0]))
        ]
        # The same again, as after a resume, is no other result.
        again = [report.write(result, tmp_path, 0, writer)[0].name for result in results]
    assert names == ["step-0.json", "step-0-2.json", "step-5.json"]
    assert again == names[:2]
    for name, weights in zip(names, "aba", strict=True):
        assert json.loads((tmp_path / name).read_text())["weights"] == weights
        assert (tmp_path / name).with_suffix(".png").is_file()
    tag = "evaluation/needle/logprob/64"
    for folder, logged in (("", {-1.0}), ("step-0-2", {-2.0})):
        events = EventAccumulator(str(tmp_path / folder)).Reload()
        assert {event.value for event in events.Scalars(tag)} == logged


BASE = ["--job.config_file", "train_configs/debug_cpu.toml", "--evaluation.enable"]


def test_the_same_samples_every_time(encode: Encoder, hay: Haystack) -> None:
    config = load_config([*BASE, "--evaluation.lengths", "320", "512"])
    assert lengths_of(config) == [320, 512]
    first, again = ([case.make(encode, hay) for case in list_cases(config)] for _ in range(2))
    assert len(first) == 5 * 2 * 5 * 2
    for one, other in zip(first, again, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
    assert len({sample.tokens.tobytes() for sample in first}) == len(first)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--evaluation.tasks", "nothing"), 'evaluation.tasks = ["nothing"]: unknown task'),
        (("--evaluation.depths", "50"), "evaluation.depths = [50.0]: a depth is a share"),
        (("--evaluation.lengths", "50"), "evaluation.lengths: 50 tokens are too few"),
        (("--evaluation.lengths", "99999"), "evaluation.lengths = [99999]: longer than [rope]"),
        (("--evaluation.samples", "0"), "evaluation.samples = 0: out of range"),
        (("--evaluation.samples", str(10**9)), "evaluation.samples = 1000000000: too many"),
        (("--evaluation.texts", str(10**9)), "evaluation.texts = 1000000000: too many"),
        (("--evaluation.lengths", str(10**12)), "evaluation.lengths = [1000000000000]: out of"),
        (("--evaluation.freq", "0"), "evaluation.freq = 0: out of range"),
        (("--evaluation.dataset", "nothing"), "evaluation.dataset"),
        (
            (
                *("--parallelism.pipeline_parallel_degree", "2"),
                *("--parallelism.context_parallel_degree", "1"),
            ),
            "an evaluation needs the whole model",
        ),
    ],
)
def test_refusals(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=": ") as error:
        load_config([*BASE, *settings], world_size=2)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
