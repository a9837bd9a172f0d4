"""What an observer is told of a ring, and what it costs."""

import time

import pytest
import torch

from recipes.metrics.ring_clock import HostRingClock
from striped_cp import RingObserver, Striped, observe, ring_attention
from striped_cp.algorithm import attention_backward, attention_forward
from striped_cp.kernels import KERNELS
from striped_cp.kernels.base import BackwardInputs, Inputs
from striped_cp.loopback import loopback
from striped_cp.observer import observed
from striped_cp.ring import Ring
from striped_cp.tiles import tiles_of_rank
from tests.helpers.loopback import random_inputs

WORLD_SIZE, ROWS, HEADS, KV_HEADS, HEAD_DIM = 4, 3, 4, 2, 8


class Recorder(RingObserver):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent: list[int] = []

    def start(self, span):
        self.events.append(span)

    def stop(self, span):
        self.events.append(f"/{span}")

    def send(self, size):
        self.sent.append(size)


def watch(recorder: Recorder | None, rotate_method: str) -> tuple[torch.Tensor, ...]:
    """Results of rank 0 of a ring of 4, its forward and backward pass watched."""
    inputs = random_inputs(1, (HEADS, KV_HEADS), WORLD_SIZE * ROWS, HEAD_DIM, torch.float32)

    def rank_main(ring: Ring) -> tuple[torch.Tensor, ...]:
        kernel = KERNELS["cpu"]
        if ring.rank == 0:
            with observe(recorder):
                (ring,), kernel = observed((ring,), kernel)
        layout = Striped()
        seq_len = WORLD_SIZE * ROWS
        rows = layout.positions(seq_len, WORLD_SIZE, ring.rank)
        q, k, v, grad_out = (x[:, :, rows] for x in inputs)
        options = (tiles_of_rank(layout, seq_len, WORLD_SIZE, ring.rank), kernel, ring)
        out, lse = attention_forward(Inputs(q, k, v), *options, 0.3, rotate_method)
        return out, *attention_backward(
            BackwardInputs(q, k, v, out, lse, grad_out), *options, 0.3, rotate_method
        )

    return loopback(WORLD_SIZE, rank_main)[0]


@pytest.mark.parametrize("rotate_method", ["ring", "allgather"])
def test_spans_do_not_nest_and_results_stay(rotate_method):
    recorder = Recorder()
    for got, want in zip(watch(recorder, rotate_method), watch(None, rotate_method), strict=True):
        assert torch.equal(got, want)
    starts, stops = recorder.events[::2], recorder.events[1::2]
    assert stops == [f"/{span}" for span in starts]
    # Each of 4 tiles forward and 4 backward asks the kernel for its blocks until there is no more.
    assert starts.count("attention") >= 2 * 2 * WORLD_SIZE
    # Ring: 3 hops forward; backward 3 of keys and 4 of gradients. Otherwise: keys twice, gradients.
    waits = {"ring": 3 + 3 + 4, "allgather": 1 + 1 + 2}
    assert starts.count("wait") == waits[rotate_method]


@pytest.mark.parametrize("rotate_method", ["ring", "allgather"])
def test_bytes_sent(rotate_method):
    recorder = Recorder()
    watch(recorder, rotate_method)
    # K and V of 3 tokens in float32 travel 3 hops in each direction, dK and dV 4 or 3.
    kv = 2 * ROWS * KV_HEADS * HEAD_DIM * 4
    gradient_hops = {"ring": 4, "allgather": 3}[rotate_method]
    assert sum(recorder.sent) == (3 + 3 + gradient_hops) * kv


def test_the_op_is_watched_only_in_the_scope():
    q, k, v, grad_out = random_inputs(1, (2, 2), 8, 8, torch.float32)
    q.requires_grad_()
    recorder = Recorder()
    with observe(recorder), observe(None):
        ring_attention(q, k, v, mesh=None)
    assert recorder.events == []
    with observe(recorder):
        out = ring_attention(q, k, v, mesh=None)
        forward = len(recorder.events)
        out.backward(grad_out)
    assert 0 < forward < len(recorder.events)
    after = len(recorder.events)
    ring_attention(q, k, v, mesh=None)
    assert len(recorder.events) == after


def test_cost_of_watching():
    """Less than 1 % of the tile it watches, though the tile is small."""
    clock = HostRingClock()
    began = time.thread_time()
    for _ in range(1000):
        clock.start("attention")
        clock.stop("attention")
        clock.start("wait")
        clock.stop("wait")
    per_tile = (time.thread_time() - began) / 1000
    q, k, v, _ = random_inputs(1, (8, 4), 2048, 16, torch.float32)
    began = time.thread_time()
    ring_attention(q, k, v, mesh=None)
    tile = time.thread_time() - began
    print(f"{1e6 * per_tile:.1f} us of watching, {1e6 * tile:.0f} us of attention a tile")
    assert per_tile < 0.01 * tile
