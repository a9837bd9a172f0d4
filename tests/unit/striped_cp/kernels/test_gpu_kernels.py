"""CUDA kernels against the reference kernel: forward and backward at 4,096 tokens per rank."""

import pytest
import torch

from striped_cp import Contiguous, Documents, HeadTail, Striped, ring_attention
from tests.helpers.loopback import random_inputs, run_loopback
from tests.helpers.reference import check_all_close, check_close, reference_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu"),
]

WORLD_SIZE, SEQ_LEN = 4, 16_384
# Documents shorter than the ring: some ranks hold nothing of them, and segments are empty.
SHORT = [0, 1, 3, 6, 4096, 4099, 12_000, 16_383, SEQ_LEN]
DOCUMENTS = Documents.from_cu_seqlens([SHORT, [0, 9000, SEQ_LEN]])
LAYOUTS = [Striped(), Striped(128), HeadTail(), Contiguous()]


@pytest.fixture(autouse=True)
def _compile_anew():
    """torch.compile gives up after some shapes of a function, and runs it eagerly."""
    torch.compiler.reset()


def check_ring(kernel, layout, documents, dtype, heads=(4, 2), head_dim=64, **options):
    inputs = tuple(x.cuda() for x in random_inputs(2, heads, SEQ_LEN, head_dim, dtype))
    got = run_loopback(inputs, layout, WORLD_SIZE, documents, kernel=kernel, **options)
    exact = tuple(x.float() for x in inputs)
    want = run_loopback(exact, layout, WORLD_SIZE, documents, kernel="reference", **options)
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=False):
        assert x.dtype == dtype
        check_close(name, x, y)
    for x, y in zip(got[4:], want[4:], strict=True):
        check_close("dsinks", x, y, dtype)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["plain", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash(layout, documents, dtype):
    check_ring("flash", layout, documents, dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_cudnn(layout):
    check_ring("cudnn", layout, None, torch.bfloat16)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["plain", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.spec)
def test_flex(layout, documents):
    check_ring("flex", layout, documents, torch.bfloat16)


@pytest.mark.parametrize("window", [1, 1000, 5000])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["plain", "packed"])
@pytest.mark.parametrize("layout", [Striped(), HeadTail(), Contiguous()], ids=lambda x: x.spec)
@pytest.mark.parametrize("kernel", ["flash", "flex", "cudnn"])
def test_windows_and_sinks(kernel, layout, documents, window):
    if kernel == "cudnn" and documents is not None:
        pytest.skip("cuDNN serves no documents")
    sinks = torch.tensor([-2.0, 0.0, 1.0, 4.0], device="cuda")
    check_ring(kernel, layout, documents, torch.bfloat16, window=window, sinks=sinks)


def test_flash_with_heads_of_128_and_eight_queries_per_key_head():
    check_ring("flash", Striped(), DOCUMENTS, torch.bfloat16, heads=(8, 1), head_dim=128)


@pytest.mark.parametrize("kernel", ["flash", "flex"])
def test_through_the_custom_op_and_autograd(kernel):
    """A ring of one, as at context-parallel degree 1 with documents: flex differentiates inside."""
    inputs = [x.cuda() for x in random_inputs(2, (4, 2), 1024, 64, torch.bfloat16)]
    documents = Documents.from_cu_seqlens([[0, 1, 700, 1024], [0, 1024]])
    q, k, v = (x.detach().requires_grad_() for x in inputs[:3])
    out = ring_attention(q, k, v, mesh=None, documents=documents, kernel=kernel)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3])
    want = reference_gradients(*(x.cpu() for x in inputs), documents)
    check_all_close([x.cpu() for x in (out, *grads)], want)
