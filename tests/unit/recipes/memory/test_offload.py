"""Checkpoint offload on a device with its own memory: which copy starts when.

No GPU: streams that run everything at once and write down what they were told.
"""

import gc
import weakref

import pytest
import torch

from recipes.memory import offload
from recipes.memory.offload import CheckpointOffload
from tests.unit.recipes.memory.test_activation_checkpoint import checkpointed, make_model, run

BLOCKS = 4


class Stream:
    """Runs at once; notes copies made inside `with`, and events that it waits for."""

    log: list

    def __init__(self, name="side"):
        self.name = name

    def __enter__(self):
        Stream.log.append("copy")

    def __exit__(self, *_):
        pass

    def wait_stream(self, other):
        assert (self.name, other.name) == ("side", "compute")

    def record_event(self):
        assert self.name == "side"
        return object()

    def wait_event(self, event):
        assert self.name == "compute"
        Stream.log.append("wait")


@pytest.fixture
def device(monkeypatch):
    """The CPU as a device with a memory of its own; yields the log of its streams."""
    Stream.log = []
    compute = Stream("compute")
    monkeypatch.setattr(offload, "has_own_memory", lambda device: True)
    monkeypatch.setattr(offload, "_empty_on_host", lambda tensor: torch.empty_like(tensor))
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: compute)
    return Stream.log


@pytest.mark.parametrize(("recompute", "tensors"), [(True, 1), (False, 3)])
def test_a_model_trains_the_same(recompute, tensors, device):
    """Per block: its input, and with the attention kept also out and LSE."""
    loss, grads = run(checkpointed("full", recompute_attention=recompute, offload=True))
    assert device.count("copy") == 2 * tensors * BLOCKS
    expected_loss, expected = run(make_model())
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(grads[name], expected[name]) for name in expected)


def test_the_block_before_is_sent_for(device):
    """Backward through block i starts the copies of block i - 1, once."""
    store = CheckpointOffload()
    store.start()
    stored = []
    for _ in range(3):
        x = torch.randn(4)
        with store.block(x):
            stored.append((store.store(x), store.store(2 * x), x.clone()))
    device.clear()
    arrived = []
    for first, second, x in reversed(stored):
        assert torch.equal(store.fetch(first), x)
        arrived.append(device.count("copy"))
        assert torch.equal(store.fetch(second), 2 * x)
        assert device.count("copy") == arrived[-1]
    assert arrived == [4, 6, 6]


def test_device_memory_is_given_back(device):
    """A tensor is held until its copy is known to come before what may overwrite it."""
    store = CheckpointOffload()
    store.start()
    x, y = torch.randn(4), torch.randn(4)
    with store.block(x):
        store.store(x)
        assert [t is x for t, _ in store._leaving] == [True]
        assert "wait" not in device
        kept = store.store(y)
        assert [t is y for t, _ in store._leaving] == [True]
        store.fetch(kept)
        assert store._leaving == []


def test_memory_goes_with_the_graph(device):
    """Of device and host, without a garbage collection: torchtitan runs one every so many steps."""
    store = CheckpointOffload()
    store.start()
    x = torch.randn(4, requires_grad=True)
    y = x * 1
    gc.disable()
    try:
        with store.block(y):
            z = (y**2).sum()
        host = store._blocks.tensors[0]
        on_device = weakref.ref(y)
        store._let_go()
        del y
        assert on_device() is None
        assert host() is not None
        z.backward()
        del z
        assert host() is None
    finally:
        gc.enable()
    torch.testing.assert_close(x.grad, 2 * x.detach())
