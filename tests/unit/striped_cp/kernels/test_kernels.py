"""Choice and refusals of kernels; the plans of the CUDA kernels, checked by enumeration."""

import gc
import itertools
import weakref

import pytest
import torch

from striped_cp import Contiguous, Documents, HeadTail, Striped
from striped_cp.kernels import KERNELS, Request, choose_kernel, dense, flex
from striped_cp.kernels.flex import tile_block_mask
from striped_cp.tiles import tiles_of_rank
from tests.helpers.loopback import random_inputs, run_loopback
from tests.helpers.reference import check_all_close, reference_gradients, visible_pairs

LAYOUTS = [Striped(), Striped(4), HeadTail(), Contiguous()]
WINDOWED = [Striped(), HeadTail(), Contiguous()]
DOCUMENTS = Documents.from_cu_seqlens([[0, 1, 7, 40, 41, 48], [0, 20, 21, 48]])


def request(device="cuda", dtype=torch.bfloat16, head_dim=128, packed=False):
    return Request(device, dtype, head_dim, packed)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (request("cpu"), "cpu"),
        (request("cpu", torch.float64, 7), "cpu"),
        (request(), "flash"),
        (request(packed=True), "flash"),
        (request(head_dim=256), "flash"),
        (request(dtype=torch.float32), "flex"),
        (request(head_dim=100), "flex"),
    ],
)
def test_auto(wanted, expected):
    assert choose_kernel("auto", wanted).name == expected


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("cpu", request(), r"'cpu' cannot serve: .*'cuda'; kernels that can: 'flash', 'cudnn'"),
        ("flash", request("cpu"), r"'flash' cannot serve: .*'cpu'; kernels that can: 'cpu'"),
        ("flash", request(dtype=torch.float32), r"not torch.float32; kernels that can: 'flex'"),
        ("flash", request(head_dim=100), r"multiple of 8 up to 256, not 100"),
        ("cudnn", request(packed=True), r"documents need variable-length calls"),
        ("cudnn", request(head_dim=256), r"up to 128, not 256"),
        ("flex", request("cpu"), r"backward on CUDA only"),
        ("auto", request(dtype=torch.float32, head_dim=8), r"'flex' cannot .* at least 16, not 8"),
        ("flex", request(dtype=torch.float64), r"not float64; kernels that can: 'reference'"),
    ],
)
def test_an_explicit_choice_that_cannot_serve_says_why(name, wanted, message):
    with pytest.raises(ValueError, match=message):
        choose_kernel(name, wanted)


@pytest.mark.parametrize(("capability", "name"), [((7, 5), None), ((8, 0), "flash")])
def test_gpus_that_are_too_old_are_refused_by_their_capability(monkeypatch, capability, name):
    monkeypatch.setattr(dense, "compute_capability", lambda: capability)
    if name is not None:
        assert choose_kernel("auto", request()).name == name
        return
    for wanted in ("auto", "flash", "cudnn", "flex"):
        message = r"capability 8\.0 or later, this one has 7\.5; kernels that can: 'reference'$"
        with pytest.raises(ValueError, match=message):
            choose_kernel(wanted, request(dtype=torch.float16))
    assert choose_kernel("auto", request("cpu")).name == "cpu"


def test_deterministic_algorithms_are_not_those_of_cudnn():
    choose_kernel("cudnn", request())
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(ValueError, match=r"not deterministic, .*can: 'flash', 'flex', 'refer"):
            choose_kernel("cudnn", request())
        torch.use_deterministic_algorithms(True, warn_only=True)
        choose_kernel("cudnn", request())
    finally:
        torch.use_deterministic_algorithms(False)


def test_block_masks_of_past_batches_are_freed():
    alive = []
    for cut in range(1, 31):
        documents = Documents.from_cu_seqlens([[0, cut, 48]])
        for tile in tiles_of_rank(Striped(), 48, 4, 0, documents):
            alive.append(weakref.ref(tile_block_mask(tile, torch.device("cpu"))))
    gc.collect()
    assert sum(mask() is not None for mask in alive) == 32


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize(
    ("layout", "window"),
    [*((x, None) for x in LAYOUTS), *itertools.product(WINDOWED, (1, 150, 900))],
    ids=lambda x: getattr(x, "spec", str(x)),
)
def test_flex_block_mask(layout, window, packed):
    """Blocks marked full are full, blocks left out are empty, the rest is masked by position."""
    seq_len, world_size = 1200, 3  # 400 rows: three whole blocks of 128 and a part
    cuts = [[0, 1, 130, 700, 1200], [0, 400, 401, 1200]]
    documents = Documents.from_cu_seqlens(cuts) if packed else None
    batch = 2 if packed else 1
    visible = visible_pairs(seq_len, documents, batch, window)
    for p in range(world_size):
        for tile in tiles_of_rank(layout, seq_len, world_size, p, documents, window):
            q, k = (layout.positions(seq_len, world_size, r) for r in (p, tile.key_rank))
            want = visible[:, q][:, :, k]
            block_mask = tile_block_mask(tile, torch.device("cpu"))
            rows = torch.arange(seq_len // world_size)
            b = torch.arange(batch)[:, None, None]
            masked = block_mask.mask_mod(b, b * 0, rows[:, None], rows[None, :])
            assert torch.equal(masked.expand_as(want), want)
            computed = torch.zeros(batch, 4, 4, dtype=torch.bool)
            full = torch.zeros(batch, 4, 4, dtype=torch.bool)
            for row in range(batch):
                for i in range(4):
                    n = block_mask.kv_num_blocks[row, 0, i]
                    computed[row, i, block_mask.kv_indices[row, 0, i, :n].long()] = True
                    n = block_mask.full_kv_num_blocks[row, 0, i]
                    full[row, i, block_mask.full_kv_indices[row, 0, i, :n].long()] = True
            assert not (computed & full).any()
            for row in range(batch):
                for i in range(4):
                    for j in range(4):
                        block = want[row, i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
                        if full[row, i, j]:
                            assert block.all()
                        elif not computed[row, i, j]:
                            assert not block.any()


def test_flex_backward_formula(monkeypatch):
    """The chain rule through the merge, with a differentiable stand-in for FlexAttention."""

    def dense_attend(x, tile, scale):
        query, key, value = x
        mask = tile_block_mask(tile, query.device).mask_mod
        rows = torch.arange(query.shape[2])
        b = torch.arange(query.shape[0])[:, None, None]
        visible = mask(b, b * 0, rows[:, None], rows[None, :])[:, None]
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scores = scale * query @ key.transpose(-1, -2)
        scores = scores.masked_fill(~visible, -1e30)
        lse = torch.where(visible.any(-1), scores.logsumexp(-1), float("-inf"))
        return (scores.softmax(-1) * visible) @ value, lse

    monkeypatch.setattr(flex, "_attend", dense_attend)
    inputs = random_inputs(2, (4, 2), 48, 8, torch.float64)
    for layout, window in [*((x, None) for x in LAYOUTS), *itertools.product(WINDOWED, (3, 20))]:
        got = run_loopback(inputs, layout, 4, DOCUMENTS, kernel="flex", window=window)
        want = reference_gradients(*inputs, DOCUMENTS, window=window)
        check_all_close(got, want)


def test_every_kernel_has_its_name():
    assert {name: kernel.name for name, kernel in KERNELS.items()} == {n: n for n in KERNELS}
