"""Merging partial results: rows without keys, sentinels, extreme log-sum-exps."""

from itertools import product

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from striped_cp import Documents, merge
from striped_cp.layout import layout_from_spec
from striped_cp.merge import merge_
from tests.helpers.loopback import random_inputs, run_loopback
from tests.helpers.reference import check_close


def merged(lse: float, new_lse: float) -> tuple[float, float]:
    out, total = torch.tensor([[1.0, 1.0]]), torch.tensor([lse])
    merge_(out, total, torch.tensor([[3.0, 3.0]]), torch.tensor([new_lse]))
    return out[0, 0].item(), total.item()


@pytest.mark.parametrize("sentinel", [float("-inf"), float("inf")])
def test_a_row_that_saw_no_key_changes_nothing(sentinel):
    assert merged(0.5, sentinel) == (1.0, 0.5)


def test_equal_weights():
    out, lse = merged(2.0, 2.0)
    assert out == pytest.approx(2.0)
    assert lse == pytest.approx(2.0 + 0.6931472)


@pytest.mark.parametrize(
    ("lse", "new_lse", "out"), [(-30.0, 70.0, 3.0), (70.0, -30.0, 1.0), (1e4, 2e4, 3.0)]
)
def test_extreme_log_sum_exps_do_not_overflow(lse, new_lse, out):
    assert merged(lse, new_lse) == (pytest.approx(out), pytest.approx(max(lse, new_lse)))


def test_partial_results_in_16_bits_merge_in_float32():
    out, lse = torch.ones(1, 4), torch.zeros(1)
    merge_(out, lse, torch.full((1, 4), 1.0078125, dtype=torch.bfloat16), torch.tensor([-5.0]))
    assert out.dtype == torch.float32
    assert out[0, 0].item() == pytest.approx(
        1 + 0.0078125 * torch.sigmoid(torch.tensor(-5.0)).item()
    )


def test_torch_compile_takes_every_variant_of_a_run(monkeypatch):
    """More than torch.compile's own limit of eight, beyond which it would run as it stands."""
    counter = CompileCounter()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **how: compile_(f, backend=counter, **how))
    merge.compiled_merge.cache_clear()
    compiled = merge.compiled_merge()
    merge.compiled_merge.cache_clear()
    cuts = [[0, 1, 3, 6, 85, 255, 256], [0, 129, 256]]
    cases = list(product((1, 2), (torch.float32, torch.bfloat16), ("striped", "striped:16")))
    want, got = [], []
    for results in (want, got):
        for batch, dtype, layout in cases:
            inputs = random_inputs(batch, (4, 2), 256, 16, dtype)
            documents = Documents.from_cu_seqlens(cuts[:batch])
            results += run_loopback(inputs, layout_from_spec(layout), 4, documents, kernel="cpu")
        monkeypatch.setattr(merge, "merge_", compiled)
    assert counter.frame_count > 8
    for a, b in zip(got, want, strict=True):
        check_close("merged", a, b)
