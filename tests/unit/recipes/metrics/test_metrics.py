"""Metrics against figures worked out by hand."""

import dataclasses
import importlib
import json
import re
import time
from types import SimpleNamespace

import pytest
import torch
from torchtitan.models.utils import get_dense_model_nparams_and_flops
from torchtitan.tools.logging import logger

from recipes.memory.loss import LossHead, build_loss, collect_token_losses
from recipes.metrics import processor, ring_clock
from recipes.metrics.charts import custom_scalars, twins
from recipes.metrics.interval import Interval
from recipes.metrics.positions import LossByPosition
from recipes.metrics.progress import signs_of_life
from recipes.metrics.ring_clock import HostRingClock, RingTimes, wait_warning
from recipes.metrics.summary import Summary, Work
from recipes.models.decoder.model import Transformer
from recipes.preflight import load_config
from recipes.titan.patches import own_tensorboard_folder
from striped_cp import Documents
from tests.helpers.models import flavor
from tests.helpers.reference import visible_pairs as dense_pairs

IGNORE = -100


def test_flops_of_both_conventions():
    # 8B: 6 * 7,504,924,672 parameters but for the token embedding (Llama 3, arXiv 2407.21783), and
    # 12 * 32 layers * 4096 wide per pair. At 1M tokens half of the square is 0.86971e12 in all.
    flops = flavor("8B").shape.training_flops_per_token
    assert flops(0) == 6 * 7_504_924_672
    assert flops(2**20) == pytest.approx(1.6943e12, rel=1e-4)
    assert flops((2**20 + 1) / 2) == pytest.approx(8.6966e11, rel=1e-4)


def test_flops_are_those_of_torchtitan():
    args = flavor("debugmodel")
    model = Transformer(args)
    theirs = get_dense_model_nparams_and_flops(args, model, 2 * args.shape.head_dim, 512)
    assert args.get_nparams_and_flops(model, 512) == theirs


def test_pairs_count_documents_as_they_are():
    shape = flavor("8B").shape
    assert shape.visible_pairs([8, 8]) == 2 * 36
    # Documents of 3 and 5 tokens, and one of 8; repeated ends are no documents.
    boundaries = torch.tensor([[0, 3, 8, 8], [0, 8, 8, 8]])
    assert shape.visible_pairs(boundaries.diff(dim=1).numpy()) == (6 + 15) + 36


def test_pairs_are_those_in_the_windows_of_the_layers():
    # Four layers: two of window 3, one of 6, one of all.
    shape = dataclasses.replace(flavor("debugmodel").shape, windows=(3, None, 6))
    boundaries = torch.tensor([[0, 3, 8, 20], [0, 20, 20, 20]])
    counted = {
        window: int(dense_pairs(20, Documents(boundaries), 2, window).sum())
        for window in (3, None, 6)
    }
    mean = (2 * counted[3] + counted[None] + counted[6]) / 4
    assert shape.visible_pairs(boundaries.diff(dim=1).numpy()) == mean
    assert counted[3] < counted[6] < counted[None]
    one = sum(int(dense_pairs(20, None, 1, window).sum()) for window in (3, None, 6, 3)) / 4
    assert shape.visible_pairs([20, 20]) == 2 * one


def test_causal_mfu_counts_windowed_pairs():
    shape = dataclasses.replace(flavor("debugmodel").shape, windows=(64, None))
    interval = Interval()
    labels = torch.ones(1, 512, dtype=torch.int64)
    interval.count_batch(shape, None, labels, labels, 0.0, mask_documents=False)
    band = 64 * 65 / 2 + (512 - 64) * 64
    pairs = interval.over(None, torch.device("cpu")).pairs_per_token
    assert pairs == (513 / 2 + band / 512) / 2


def test_loss_by_position_averages_back_to_the_loss():
    generator = torch.Generator().manual_seed(0)
    meter = LossByPosition(300, "cpu")
    total, count = 0.0, 0
    for _ in range(3):
        labels = torch.randint(0, 9, (2, 300), generator=generator)
        labels[torch.rand(2, 300, generator=generator) < 0.3] = IGNORE
        losses = torch.rand(2, 300, generator=generator).masked_fill(labels == IGNORE, 0.0)
        meter.add([losses[:1], losses[1:]], torch.arange(300)[None], labels)
        total += losses.double().sum().item()
        count += int((labels != IGNORE).sum())
    buckets = meter.take(None)
    assert [bucket.name for bucket in buckets] == ["0-63", "64-127", "128-255", "256-511"]
    assert sum(bucket.share for bucket in buckets) == pytest.approx(1.0, abs=1e-12)
    average = sum(bucket.loss * bucket.share for bucket in buckets)
    assert average == pytest.approx(total / count, rel=1e-12)
    assert meter.take(None) == []


def test_loss_by_position_knows_the_first_tokens_from_the_last():
    meter = LossByPosition(2**20, "cpu")
    context = torch.tensor([[0, 63, 64, 2**20 - 1], [0, 0, 0, 0]])
    losses = torch.tensor([[4.0, 2.0, 1.0, 8.0], [3.0, 3.0, 0.0, 0.0]])
    labels = torch.tensor([[1, 1, 1, 1], [1, 1, IGNORE, IGNORE]])
    meter.add([losses], context, labels)
    buckets = {bucket.name: (bucket.loss, bucket.share) for bucket in meter.take(None)}
    assert buckets == {
        "0-63": (3.0, pytest.approx(4 / 6)),
        "64-127": (1.0, pytest.approx(1 / 6)),
        "524288-1048575": (8.0, pytest.approx(1 / 6)),
    }


def test_a_pipeline_stage_without_losses_adds_nothing():
    meter = LossByPosition(128, "cpu")
    meter.add([], torch.arange(128)[None], torch.zeros(1, 128, dtype=torch.int64))
    assert meter.take(None) == []


@pytest.mark.parametrize("chunk_tokens", [0, 5])
def test_token_losses_are_those_of_the_loss(chunk_tokens):
    torch.manual_seed(0)
    hidden, labels = torch.randn(2, 7, 4), torch.randint(0, 11, (2, 7))
    labels[0, 3] = IGNORE
    head = LossHead(4, 11, 5)
    wanted = torch.nn.functional.cross_entropy(
        head(hidden).transpose(1, 2), labels, reduction="none"
    )
    loss_fn = build_loss(load_config(["--memory.loss_chunk_tokens", str(chunk_tokens)]))
    with collect_token_losses() as collected:
        loss = loss_fn(head(hidden, labels) if chunk_tokens else head(hidden), labels)
    (losses,) = collected
    assert not losses.requires_grad
    torch.testing.assert_close(losses, wanted.detach())
    torch.testing.assert_close(loss.detach(), wanted.detach().sum())
    loss_fn(head(hidden, labels) if chunk_tokens else head(hidden), labels)
    assert len(collected) == 1


def test_interval_counts_documents_and_padding():
    interval = Interval()
    labels = torch.ones(2, 8, dtype=torch.int64)
    labels[0, 6:] = IGNORE
    tokens = labels.clamp(min=0)
    boundaries = torch.tensor([[0, 4, 6, 8], [0, 8, 8, 8]])
    shape = flavor("8B").shape
    interval.count_batch(shape, boundaries, tokens, labels, 0.5, mask_documents=True)
    interval.count_batch(shape, boundaries, tokens, labels, 0.25, mask_documents=False)
    assert (interval.batches, interval.sequences, interval.tokens) == (2, 4, 32)
    assert interval.loading_seconds == 0.75
    assert interval.pairs == (10 + 3 + 3 + 36) + 2 * 36
    data = interval.over(None, torch.device("cpu"))
    assert data.documents_per_sequence == (2 + 1) / 2
    assert data.longest_document == 8
    assert data.padding_share == 2 / 16
    assert data.pairs_per_token == (52 + 72) / 32


def test_host_clock_tells_computing_from_waiting():
    clock = HostRingClock()
    clock.start("attention")
    sum(range(2_000_000))
    clock.stop("attention")
    clock.start("wait")
    time.sleep(0.05)
    clock.stop("wait")
    clock.send(7)
    clock.send(8)
    seconds = clock.seconds()
    assert seconds["attention"] > 0.005
    assert seconds["wait"] >= 0.05
    assert clock.sent_bytes == 15


def test_device_clock_reads_events_when_the_step_is_over(monkeypatch):
    now = iter(range(0, 1000, 10))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = next(now)

        def elapsed_time(self, end):
            assert synchronized
            return end.ms - self.ms

    synchronized = []
    device = SimpleNamespace(Event=Event, synchronize=lambda: synchronized.append(True))
    monkeypatch.setattr(ring_clock, "device_module", device)
    clock = ring_clock.DeviceRingClock()
    for span in ("attention", "wait", "attention"):
        clock.start(span)
        clock.stop(span)
    assert synchronized == []
    assert clock.seconds() == {"attention": 0.02, "wait": 0.01}


@pytest.mark.parametrize("validation", [False, True])
@pytest.mark.parametrize("ring", [False, True])
def test_no_chart_is_empty_or_of_what_a_run_does_not_have(validation, ring):
    charts = {
        f"{group}/{chart}": patterns
        for group, of_group in custom_scalars(validation, ring).items()
        for chart, (_, patterns) in of_group.items()
    }
    assert all(charts.values())
    shown = " ".join(pattern for patterns in charts.values() for pattern in patterns)
    assert ("validation" in shown, "ring/" in shown) == (validation, ring)


def test_charts_name_tags_as_tensorboard_reads_and_draws_them():
    kind, patterns = custom_scalars(validation=True, ring=True)["Speed"]["MFU"]
    assert kind == "Multiline"
    measured = {"mfu(%)": 2.0, "mfu_causal(%)": 1.0, "planned/mfu(%)": 3.0, "lr": 4.0}
    drawn = twins(measured)
    assert drawn == {"charts/mfu_%": 2.0, "charts/mfu_causal_%": 1.0, "charts/planned/mfu_%": 3.0}
    for tag in drawn:
        assert any(re.match(pattern, tag) for pattern in patterns)
    assert not any(re.match(pattern, "charts/mfu_%x") for pattern in patterns)
    (pattern,) = custom_scalars(validation=True, ring=True)["Loss"]["loss by position"][1]
    assert re.match(pattern, "loss_by_position/64-127")
    assert not re.match(pattern, "validation_loss_by_position/64-127")


def test_long_steps_give_signs_of_life(caplog):
    with caplog.at_level("INFO", logger=logger.name), signs_of_life(1, None, every=0.02):
        time.sleep(0.1)
    with caplog.at_level("INFO", logger=logger.name), signs_of_life(7, 300.0, every=0.02):
        time.sleep(0.1)
    lines = [record.message for record in caplog.records]
    assert any(re.match("step 1: 0 s so far", line) for line in lines)
    assert any(line == "step 7: 0 s of about 300 s" for line in lines)
    count = len(lines)
    with signs_of_life(8, 300.0, every=0.02):
        pass
    time.sleep(0.05)
    assert len(caplog.records) == count


def test_summary(tmp_path):
    summary = Summary(world_size=2, peak_flops=1e6, planned={})
    # The first step takes 10 s, the other four 8 s in all: rates are those of the four.
    summary.add(Work(1, 100, 10.0, 1e6, 5e5), tokens_seen=100, loss=5.0, memory_gib=2.0)
    for seen in (300, 500):
        summary.add(Work(2, 200, 4.0, 2e6, 1e6), tokens_seen=seen, loss=4.0, memory_gib=1.0)
    summary.imbalances += [3.0, 1.0, 1.2]
    summary.validation_loss = 4.5
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("of the run before")
    line = summary.write(tmp_path / "run", "run/tb")
    (before,) = (tmp_path / "run").glob("summary-*.json")
    assert before.read_text() == "of the run before"
    table = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert table == {
        "steps": 5,
        "tokens": 500,
        "tokens_seen": 500,
        "seconds": 18.0,
        "ranks": 2,
        "tokens_per_second": 50.0,
        "tokens_per_second_per_rank": 25.0,
        "mfu_percent": 25.0,
        "mfu_causal_percent": 12.5,
        "peak_memory_gib": 2.0,
        "ring_imbalance": 1.1,
        "loss": 4.0,
        "validation_loss": 4.5,
        "kernel": None,
        "planned": {},
        "logs": "run/tb",
    }
    assert "\n" not in line
    for part in ("5 steps, 500 tokens in 0:00:18", "25 tokens/s per rank", "causal 12.50%", "1.10"):
        assert part in line


@pytest.mark.parametrize("timeout", [139, 140])
def test_a_step_that_takes_longer_than_the_timeout_is_announced(monkeypatch, caplog, timeout):
    plans = []

    def plan_of_run(*args):
        plan = real(*args)
        plan = dataclasses.replace(
            plan,
            time=dataclasses.replace(
                plan.time, parts={"attention kernels": 140.0, "exposed ring": 0.0}
            ),
        )
        plans.append(plan)
        return plan

    real = processor.plan_of_run
    monkeypatch.setattr(processor, "plan_of_run", plan_of_run)
    monkeypatch.setattr(logger, "propagate", True)
    config = load_config(["--job.config_file", "train_configs/llama3_8b_1m.toml"])
    config.comm.train_timeout_seconds = timeout
    metrics = SimpleNamespace(
        job_config=config,
        parallel_dims=SimpleNamespace(world_size=8),
        device_memory_monitor=SimpleNamespace(device_name="NVIDIA H100 80GB HBM3"),
    )
    with caplog.at_level("INFO", logger.name):
        scalars = processor.StripedMetrics._plan(metrics)
    assert scalars["planned/end_to_end(s)"] == 140
    assert len(plans) == 1
    warnings = [r.message for r in caplog.records if r.levelname == "WARNING"]
    expected = (
        "The plan expects 140 s a step, comm.train_timeout_seconds is 139: a rank that waits for "
        "another one's step ends the run; set it to 280 or more"
    )
    assert warnings == ([expected] if timeout == 139 else [])


def test_every_run_has_a_folder_of_its_own(tmp_path):
    """Also where several start in one second."""
    titan = importlib.import_module("torchtitan.components.metrics")
    for _ in range(3):
        with own_tensorboard_folder(tmp_path):
            (tmp_path / titan.datetime.now().strftime("%Y%m%d-%H%M")).mkdir()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_ring_that_waits_says_what_hides_its_hops():
    ring = RingTimes(1.0, 1.0, 0.3, 0.2, 1.0, 0.0)
    assert wait_warning(None, 1.0) is None
    assert wait_warning(ring, 4.0) is None
    assert "waits for 10% of a step" in wait_warning(ring, 2.0)
