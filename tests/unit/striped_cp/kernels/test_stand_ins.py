"""The calls of the CUDA kernels, on operators that compute as the C++ does."""

import itertools
from types import SimpleNamespace
from weakref import WeakKeyDictionary

import pytest
import torch

from striped_cp import Contiguous, Documents, HeadTail, Striped
from striped_cp.kernels import KERNELS, cudnn, flash, varlen
from striped_cp.kernels.base import Inputs
from striped_cp.tiles import tiles_of_rank
from tests.helpers.cuda_stand_ins import stand_ins
from tests.helpers.loopback import random_inputs, run_loopback
from tests.helpers.own_layout import Snake
from tests.helpers.reference import check_all_close, reference_gradients

LAYOUTS = [Striped(), Striped(2), Striped(4), HeadTail(), Contiguous(), Snake(2)]
SEQ_LEN = 48
# Of two batch rows each; None: one document a row, dense calls.
PACKINGS = {
    "none": None,
    "one": [[0, SEQ_LEN], [0, SEQ_LEN]],
    "short": [[0, 1, 2, 3, 5, 8, 13, 21, 34, SEQ_LEN], [0, *range(1, SEQ_LEN + 1)]],
    "long and short": [[0, 40, 41, 43, SEQ_LEN], [0, 3, 4, SEQ_LEN]],
    "odd": [[0, 7, 24, 31, SEQ_LEN], [0, 17, SEQ_LEN]],
}
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
# Every pair of layout and packing, with the other choices in turn.
CASES = [
    (layout, packing, *rest)
    for (layout, packing), rest in zip(
        itertools.product(LAYOUTS, PACKINGS),
        itertools.cycle(itertools.product((2, 3, 4, 1), HEADS, ("ring", "allgather"))),
        strict=False,
    )
]


def prepare(monkeypatch, kernel, grid, packing):
    """Documents, or None, and the operators that take the place of torch's."""
    cuts = PACKINGS[packing]
    if (kernel == "cudnn" or grid == 4) and (cuts is None) != (kernel == "cudnn"):
        pytest.skip("cuDNN serves no documents, and only with them calls are shared")
    operators = stand_ins(3 if kernel == "fa3" else 2)
    monkeypatch.setattr(varlen, "GRID", grid)
    monkeypatch.setattr(flash, "_calls", WeakKeyDictionary())  # not those of another grid
    monkeypatch.setattr(flash, "aten", operators)
    monkeypatch.setattr(cudnn, "aten", operators)
    monkeypatch.setattr(flash, "_activate", lambda version: None)
    return None if cuts is None else Documents.from_cu_seqlens(cuts), operators


@pytest.mark.parametrize("grid", [128, 4], ids=["one call", "long ones alone"])
@pytest.mark.parametrize("kernel", ["flash", "fa3", "cudnn"])
@pytest.mark.parametrize(
    ("layout", "packing", "world_size", "heads", "rotate_method"),
    CASES,
    ids=lambda x: getattr(x, "spec", str(x)),
)
def test_calls_give_the_right_numbers(
    monkeypatch, kernel, grid, layout, packing, world_size, heads, rotate_method
):
    documents, _ = prepare(monkeypatch, kernel, grid, packing)
    inputs = random_inputs(2, HEADS[heads], SEQ_LEN, 8, torch.float64, 2.0)
    got = run_loopback(
        inputs, layout, world_size, documents, kernel=kernel, rotate_method=rotate_method
    )
    check_all_close(got, reference_gradients(*inputs, documents))


WINDOWED = [Striped(), HeadTail(), Contiguous()]


@pytest.mark.parametrize("grid", [128, 4], ids=["one call", "long ones alone"])
@pytest.mark.parametrize("kernel", ["flash", "fa3", "cudnn"])
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("layout", WINDOWED, ids=lambda x: x.spec)
def test_windows_give_the_right_numbers(monkeypatch, kernel, grid, layout, packing):
    documents, operators = prepare(monkeypatch, kernel, grid, packing)
    windows = []

    def watched(operator):
        def call(*args, **options):
            windows.append(options.get("window_size_left"))
            return operator(*args, **options)

        return call

    for name in ("_flash_attention_forward", "_flash_attention_backward"):
        setattr(operators, name, watched(getattr(operators, name)))
    inputs = random_inputs(2, HEADS["GQA"], SEQ_LEN, 8, torch.float64, 2.0)
    for world_size, window in itertools.product((1, 2, 3), (1, 2, 5, 16, SEQ_LEN - 1)):
        got = run_loopback(inputs, layout, world_size, documents, kernel=kernel, window=window)
        want = reference_gradients(*inputs, documents, window=window)
        check_all_close(got, want, f"P = {world_size}, window {window}:")
    assert any(x is not None for x in windows) == (kernel != "cudnn")


@pytest.mark.parametrize("window", [8, 9, 33])
def test_a_windowed_tile_of_token_stripes_is_one_flash_attention_call(monkeypatch, window):
    calls = []

    def watched(*args, **options):
        calls.append((args[8], options["window_size_left"], options["window_size_right"]))
        return stand_ins()._flash_attention_forward(*args, **options)

    monkeypatch.setattr(flash, "aten", SimpleNamespace(_flash_attention_forward=watched))
    monkeypatch.setattr(flash, "_activate", lambda version: None)
    q, k, v, _ = random_inputs(2, (4, 2), 32, 8, torch.float64)
    for documents in (None, Documents.from_cu_seqlens([[0, 3, 128], [0, 1, 2, 128]])):
        for p, tile in enumerate(tiles_of_rank(Striped(), 128, 4, 3, documents, window)):
            calls.clear()
            list(KERNELS["flash"].forward(Inputs(q, k, v), tile, 0.3))
            # Token i sees i - j = p tokens fewer than in a window of whole steps.
            assert calls == [(True, (window - 1 - p) // 4, 0)]


def test_each_version_of_flash_attention_activates_its_own(monkeypatch):
    calls = []
    monkeypatch.setattr(flash, "_activated", None)
    monkeypatch.setattr(flash.attention, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr(
        flash.attention, "restore_flash_attention_impl", lambda: calls.append("restore")
    )
    for name in ("flash", "fa3", "fa3", "fa4", "flash", "flash"):
        flash._activate(KERNELS[name].version)
    assert calls == ["FA3", "FA4", "restore"]


@pytest.mark.parametrize("layout", [Striped(), HeadTail()], ids=lambda x: x.spec)
def test_cudnn_is_not_called_with_one_key(monkeypatch, layout):
    monkeypatch.setattr(cudnn, "aten", stand_ins())
    for rows in (1, 2):
        inputs = random_inputs(2, (4, 2), 4 * rows, 8, torch.float64, 2.0)
        got = run_loopback(inputs, layout, 4, kernel="cudnn")
        check_all_close(got, reference_gradients(*inputs))


def test_layers_on_other_devices_have_calls_of_their_own():
    documents = Documents.from_cu_seqlens([[0, 3, 7, SEQ_LEN]])
    (tile_pass,) = tiles_of_rank(Striped(), SEQ_LEN, 2, 0, documents)[0].passes
    for device in ("meta", "cpu", "meta"):
        query = torch.empty(1, 2, SEQ_LEN // 2, 8, device=device)
        for call in flash.device_calls(tile_pass, query):
            assert call.idle.device.type == device
