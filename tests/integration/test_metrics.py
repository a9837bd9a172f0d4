"""What real runs write about themselves, read back from their event files."""

import itertools
import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from recipes.data.dataset import build_dataloader
from recipes.data.tokens import build_tokenizer
from recipes.preflight import load_config
from tests.helpers.runs import RECIPE, ROOT, Run, train
from tests.integration.conftest import STEPS

LOSS = "loss_metrics/global_avg_loss"
TOKENS = "n_tokens_seen"
TPS, SECONDS = "throughput(tps)", "time_metrics/end_to_end(s)"
# The debug model: 1,311,872 parameters, 2048 x 128 of them token embedding; 12 * 4 layers * 128
# wide per (query, key) pair.
LINEAR_FLOPS, PAIR_FLOPS = 6 * (1_311_872 - 2048 * 128), 12 * 4 * 128
SEQ_LEN = 132  # of the tiny runs

BATCH = ("--training.local_batch_size", "1", "--lr_scheduler.warmup_steps", "1")
LONG = ("--training.seq_len", "8192", *BATCH, "--metrics.log_freq", "1")


# Stands in for the package: writes down what it is given.
WANDB = """
import json, pathlib
run = None
def init(dir, **settings):
    global run
    run = (pathlib.Path(dir) / "wandb.jsonl").open("w")
def log(metrics, step):
    run.write(json.dumps({"step": step, "metrics": metrics}) + "\\n")
def finish():
    run.close()
"""


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory, common: tuple[str, ...]) -> Run:
    """5 steps of 2 batches, logged at 1, 3 and 5, with validation in between; no ring measured.

    The last step is profiled, and Weights & Biases is told.
    """
    modules = tmp_path_factory.mktemp("modules")
    (modules / "wandb.py").write_text(WANDB)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(modules))
        return train(
            2,
            tmp_path_factory.mktemp("uneven"),
            *common,
            *("--training.steps", "5", "--metrics.log_freq", "3", "--metrics.no_ring"),
            *("--training.global_batch_size", "4", "--memory.loss_chunk_tokens", "0"),
            *("--validation.enable", "--validation.freq", "2", "--validation.steps", "1"),
            *("--profiling.enable_profiling", "--profiling.profile_freq", "5"),
            "--metrics.enable_wandb",
        )


@pytest.fixture(scope="module")
def by_layout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Two steps of 8,192 tokens on two ranks."""
    return {
        layout: train(
            2,
            tmp_path_factory.mktemp(layout),
            *(*LONG, "--training.steps", "2"),
            *("--parallelism.context_parallel_load_balancer", layout),
        )
        for layout in ("contiguous", "striped")
    }


def average_by_position(run: Run, step: int, prefix: str = "") -> float:
    losses, shares = (
        {tag.split("/")[1]: values for tag, values in run.scalars.items() if tag.startswith(head)}
        for head in (f"{prefix}loss_by_position/", f"{prefix}token_share_by_position/")
    )
    assert len(losses) >= 2
    assert losses.keys() == shares.keys()
    return sum(losses[name][step] * shares[name][step] for name in losses if step in losses[name])


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_tokens_are_speed_times_ranks_times_time(by_degree: dict[int, Run], degree: int) -> None:
    scalars = by_degree[degree].scalars
    for step in range(1, STEPS + 1):
        tokens = scalars[TPS][step] * degree * scalars[SECONDS][step]
        assert tokens == pytest.approx(2 * SEQ_LEN, rel=1e-5)
        assert scalars["throughput_total(tps)"][step] == pytest.approx(
            degree * scalars[TPS][step], rel=1e-5
        )
        assert scalars["n_sequences_seen"][step] == 2 * step


def test_time_per_step_where_log_freq_does_not_divide(uneven: Run) -> None:
    scalars = uneven.scalars
    assert sorted(scalars[TPS]) == [1, 3, 5]
    for step, steps in ((1, 1), (3, 2), (5, 2)):
        tokens = scalars[TPS][step] * 2 * scalars[SECONDS][step] * steps
        assert tokens == pytest.approx(steps * 4 * SEQ_LEN, rel=1e-5)
        assert scalars[TOKENS][step] == step * 4 * SEQ_LEN
        assert 0 <= scalars["time_metrics/data_loading(%)"][step] < 100
        left = (5 - step) * scalars[SECONDS][step] / 3600
        assert scalars["time_metrics/left(h)"][step] == pytest.approx(left, rel=1e-5)
    summary = read_summary(uneven)
    seconds = sum(steps * scalars[SECONDS][step] for step, steps in ((1, 1), (3, 2), (5, 2)))
    assert summary["seconds"] == pytest.approx(seconds, rel=1e-4)
    assert summary["steps"] == 5
    assert summary["tokens"] == 5 * 4 * SEQ_LEN
    steady = 4 * 4 * SEQ_LEN / (seconds - scalars[SECONDS][1])
    assert summary["tokens_per_second"] == pytest.approx(steady, rel=1e-4)


def test_mfu_follows_from_closed_formulas(by_degree: dict[int, Run], common) -> None:
    run = by_degree[2]
    found = re.search(r"Peak FLOPS used for computing MFU: (\S+)", run.output)
    assert found is not None
    peak = float(found[1])
    # The documents of the same batches, counted one by one.
    config = load_config(["--job.config_file", str(ROOT / RECIPE), *common])
    loader = iter(build_dataloader(1, 0, build_tokenizer(config), config))
    for step in range(1, STEPS + 1):
        inputs, _ = next(loader)
        lengths = [
            end - start
            for row in inputs["boundaries"].tolist()
            for start, end in itertools.pairwise(row)
        ]
        assert sum(lengths) == 2 * SEQ_LEN
        pairs_per_token = sum(n * (n + 1) / 2 for n in lengths) / (2 * SEQ_LEN)
        assert pairs_per_token < SEQ_LEN / 2  # several documents in a sequence
        for tag, pairs in (("mfu(%)", SEQ_LEN), ("mfu_causal(%)", pairs_per_token)):
            flops = LINEAR_FLOPS + PAIR_FLOPS * pairs
            expected = 100 * flops * run.scalars[TPS][step] / peak
            assert run.scalars[tag][step] == pytest.approx(expected, rel=1e-3), tag


def test_loss_by_position_averages_back(by_degree: dict[int, Run], uneven: Run) -> None:
    for run in by_degree.values():
        for step in range(1, STEPS + 1):
            assert average_by_position(run, step) == pytest.approx(
                run.scalars[LOSS][step], rel=1e-5
            )
        for step in (1, 5, 10):
            average = average_by_position(run, step, "validation_")
            assert average == pytest.approx(run.scalars["validation_metrics/loss"][step], rel=1e-5)
    # Logits of all tokens at once, and two batches a step.
    assert average_by_position(uneven, 1) == pytest.approx(uneven.scalars[LOSS][1], rel=1e-5)


def test_loss_by_position_does_not_depend_on_the_degree(by_degree: dict[int, Run]) -> None:
    tags = [tag for tag in by_degree[1].scalars if "_by_position/" in tag]
    assert len(tags) >= 8
    for tag in tags:
        for degree in (2, 4):
            values, reference = (by_degree[d].scalars[tag] for d in (degree, 1))
            assert values == pytest.approx(reference, rel=1e-3), tag


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("--parallelism.pipeline_parallel_degree", "2"),
        ("--parallelism.pipeline_parallel_degree", "2", "--memory.loss_chunk_tokens", "0"),
        ("--parallelism.tensor_parallel_degree", "2", "--memory.loss_chunk_tokens", "0"),
        ("--parallelism.data_parallel_replicate_degree", "2", "--training.local_batch_size", "1"),
    ],
    ids=["pipeline", "pipeline, logits", "tensor, logits", "data"],
)
def test_other_parallelisms_know_loss_by_position(
    common: tuple[str, ...], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    run = train(4, tmp_path, *common, *settings, "--training.steps", "3")
    for step in (1, 2, 3):
        assert average_by_position(run, step) == pytest.approx(run.scalars[LOSS][step], rel=1e-5)
        assert run.scalars["ring/imbalance"][step] >= 1
    assert read_summary(run)["tokens"] == 3 * 2 * SEQ_LEN


def test_contiguous_chunks_are_out_of_balance_and_stripes_are_not(
    by_layout: dict[str, Run],
) -> None:
    for step in (1, 2):
        # One rank has 3 tiles' worth of pairs, the other 1: 1.5 times the mean.
        assert 1.3 < by_layout["contiguous"].scalars["ring/imbalance"][step] < 1.7
        assert by_layout["striped"].scalars["ring/imbalance"][step] < 1.1
    for run in by_layout.values():
        scalars = run.scalars
        for step in (1, 2):
            attention, slowest = (
                scalars[f"ring/{name}(s)"][step] for name in ("attention", "attention_slowest")
            )
            assert slowest / attention == pytest.approx(scalars["ring/imbalance"][step], rel=1e-4)
            assert 0 < attention < scalars[SECONDS][step]
            assert 0 <= scalars["ring/wait_least(s)"][step] <= scalars["ring/wait(s)"][step]
            # 4 layers; K and V of 4,096 tokens, 64 wide, float32: one hop forward, one backward,
            # and two of their gradients.
            sent = 4 * (1 + 1 + 2) * 2 * 4096 * 64 * 4
            assert scalars["ring/sent(MB)"][step] == pytest.approx(sent / 1e6, rel=1e-6)
    # The rank with less to do waits for the other one.
    waits = {layout: run.scalars["ring/wait(s)"][2] for layout, run in by_layout.items()}
    assert waits["contiguous"] > waits["striped"]
    assert read_summary(by_layout["contiguous"])["ring_imbalance"] > 1.3


def test_one_key_switches_the_ring_off(uneven: Run, by_degree: dict[int, Run]) -> None:
    assert not [tag for tag in uneven.scalars if tag.startswith("ring/")]
    assert "imbalance" not in uneven.output.replace("no ring measured", "")
    assert read_summary(uneven)["ring_imbalance"] is None
    assert "ring/imbalance" in by_degree[2].scalars
    assert "ring/imbalance" not in by_degree[1].scalars  # no ring


def read_summary(run: Run) -> dict:
    (events,) = run.event_files
    return json.loads((events.parents[2] / "summary.json").read_text())


def test_summary_says_what_was_logged(by_degree: dict[int, Run]) -> None:
    run = by_degree[2]
    summary = read_summary(run)
    assert summary["tokens"] == summary["tokens_seen"] == STEPS * 2 * SEQ_LEN
    assert summary["ranks"] == 2
    assert summary["loss"] == pytest.approx(run.scalars[LOSS][STEPS], rel=1e-5)
    validation = run.scalars["validation_metrics/loss"]
    assert summary["validation_loss"] == pytest.approx(validation[STEPS], rel=1e-5)
    memory = run.scalars["memory/max_reserved(GiB)"]
    assert summary["peak_memory_gib"] == pytest.approx(max(memory.values()), rel=1e-5)
    assert summary["planned"] == {}  # no plan for a CPU
    (events,) = run.event_files
    assert Path(summary["logs"]) == events.parent
    (line,) = [line for line in run.output.splitlines() if "Summary:" in line]
    for part in (f"{STEPS} steps", "tokens/s per rank", "causal", "imbalance", summary["logs"]):
        assert part in line


def test_the_console_says_how_long_it_takes(by_degree: dict[int, Run]) -> None:
    assert re.search(
        r"step:  1  loss: .* mfu: .*% \(causal .*imbalance: .*left: 0:", by_degree[2].output
    )


@pytest.mark.parametrize(("degree", "validated"), [(2, True), (1, True), (2, False)])
def test_tensorboard_groups_the_charts(
    by_degree: dict[int, Run], by_layout: dict[str, Run], degree: int, validated: bool
) -> None:
    """No chart is empty, whatever the run does not have."""
    run = by_degree[degree] if validated else by_layout["striped"]
    (file,) = run.event_files
    events = EventAccumulator(str(file)).Reload()
    tensor = events.Tensors(metadata.CONFIG_SUMMARY_TAG)[0].tensor_proto
    layout = layout_pb2.Layout.FromString(tensor.string_val[0])
    groups = {category.title: category for category in layout.category}
    ring = ["Ring"] if degree > 1 else []
    assert list(groups) == ["Loss", "Speed", *ring, "Memory", "Optimizer", "Data"]
    charts = {chart.title for category in layout.category for chart in category.chart}
    assert ("validation loss by position" in charts) == validated
    assert not any("GPU" in title for title in charts)
    drawable = [tag for tag in run.scalars if "(" not in tag]
    for category in layout.category:
        for chart in category.chart:
            assert any(
                re.match(pattern, tag) for pattern in chart.multiline.tag for tag in drawable
            ), chart.title


def test_weights_and_biases_gets_the_same(uneven: Run) -> None:
    (events,) = uneven.event_files
    lines = [json.loads(line) for line in (events.parent / "wandb.jsonl").open()]
    told: dict[str, dict[int, float]] = {}
    for line in lines:
        for tag, value in line["metrics"].items():
            told.setdefault(tag, {})[line["step"]] = value
    charts = {tag for tag in uneven.scalars if tag.startswith("charts/")}
    assert told.keys() == uneven.scalars.keys() - charts
    for tag, values in told.items():
        assert values == pytest.approx(uneven.scalars[tag], rel=1e-5)


def test_the_profiler_shows_the_ring_of_every_rank(uneven: Run) -> None:
    (events,) = uneven.event_files
    traces = events.parents[2] / "profile_traces" / "iteration_5"
    for rank in (0, 1):
        trace = json.loads((traces / f"rank{rank}_trace.json").read_text())
        names = [event["name"] for event in trace["traceEvents"]]
        # 4 layers, 2 batches.
        assert names.count("striped_cp::ring_attention") == 8
        assert names.count("striped_cp::ring_attention_backward") == 8


def test_every_metric_is_documented(by_degree: dict[int, Run], uneven: Run) -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    documented = set(re.findall(r"^\| `([^`]+)`", text, re.M))
    logged = {
        re.sub(r"^charts/.*", "charts/NAME", re.sub(r"(by_position)/.*", r"\1/FROM-TO", tag))
        for run in (by_degree[2], uneven)
        for tag in run.scalars
    }
    assert logged <= documented
    assert set(read_summary(uneven)) <= documented


def test_planned_lines_stand_beside_the_measured_ones() -> None:
    from recipes.planner.log import plan_of_run, plan_scalars

    recipe = ROOT / "train_configs" / "llama3_8b_1m.toml"
    config = load_config(["--job.config_file", str(recipe)])
    scalars = plan_scalars(plan_of_run(config, 8, "NVIDIA H100 80GB HBM3"))
    text = (ROOT / "docs/reference/metrics.md").read_text()
    for tag, value in scalars.items():
        assert value > 0
        assert f"`{tag}`" in text
    assert scalars["planned/mfu(%)"] > scalars["planned/mfu_causal(%)"]
