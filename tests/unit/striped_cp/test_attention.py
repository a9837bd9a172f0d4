"""`ring_attention` on a ring of one rank: checks, custom op, compile, checkpointing."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from striped_cp import (
    Documents,
    RingAttention,
    Striped,
    StripedContextParallel,
    ops,
    ring_attention,
    ulysses,
)
from tests.helpers.loopback import random_inputs
from tests.helpers.reference import (
    check_all_close,
    check_close,
    reference_attention,
    reference_gradients,
)


def qkv(heads=(4, 2), seq_len=12, head_dim=8, dtype=torch.float32, batch=2):
    return random_inputs(batch, heads, seq_len, head_dim, dtype)[:3]


def test_one_rank_is_plain_attention():
    q, k, v = qkv(dtype=torch.float64)
    want = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    check_close("out", ring_attention(q, k, v, mesh=None), want)
    check_close("reference", reference_attention(q, k, v), want)


def test_gradients_through_autograd():
    q, k, v, grad_out = random_inputs(2, (4, 2), 12, 8, torch.float64)
    documents = Documents.from_cu_seqlens([[0, 5, 12], [0, 12]])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, mesh=None, documents=documents, scale=0.3)
    grads = torch.autograd.grad(out, leaves, grad_out)
    check_all_close((out, *grads), reference_gradients(q, k, v, grad_out, documents, 0.3))


def test_windows_and_sinks_through_autograd():
    q, k, v, grad_out = random_inputs(2, (4, 2), 12, 8, torch.float64)
    documents = Documents.from_cu_seqlens([[0, 5, 12], [0, 12]])
    sinks = torch.linspace(-2, 4, 4).bfloat16()  # of another dtype than the query
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    module = RingAttention(None)
    out = module(
        *leaves[:3], documents=documents, scale=0.3, window=3, sinks=leaves[3], enable_gqa=True
    )
    grads = torch.autograd.grad(out, leaves, grad_out)
    want = reference_gradients(q, k, v, grad_out, documents, 0.3, 3, sinks)
    assert grads[3].dtype == torch.bfloat16
    check_all_close((out, *grads), want)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda q, k, v: (q[0], k, v), r"expected \(batch, heads, sequence / P, head_dim\)"),
        (lambda q, k, v: (q, k[:, :, 1:], v), "key and value must have one shape"),
        (lambda q, k, v: (q, k, v[..., :4]), "key and value must have one shape"),
        (lambda q, k, v: (q, k[:1], v[:1]), "but for the heads"),
        (lambda q, k, v: (q[:, :3], k, v), "query heads must be a multiple of key heads"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), "query heads must be a multiple of key heads"),
        (lambda q, k, v: (q, k.double(), v), "must have one dtype"),
        (lambda q, k, v: (q.long(), k.long(), v.long()), "float16, bfloat16"),
        (lambda q, k, v: (q, k.to("meta"), v), "must be on one device"),
    ],
)
def test_impossible_tensors_are_refused(tensors, message):
    with pytest.raises(ValueError, match=message):
        ring_attention(*tensors(*qkv()), mesh=None)


def test_impossible_options_are_refused():
    q, k, v = qkv()
    short = Documents.from_cu_seqlens([[0, 11], [0, 11]])
    with pytest.raises(ValueError, match="12 must be a positive multiple of 8"):
        ring_attention(q, k, v, mesh=None, layout=Striped(8))
    with pytest.raises(ValueError, match="1 batch rows, the query has 2"):
        ring_attention(q, k, v, mesh=None, documents=Documents.from_cu_seqlens([[0, 12]]))
    with pytest.raises(ValueError, match="documents end at 11, but the sequence has 12"):
        ring_attention(q, k, v, mesh=None, documents=short)
    with pytest.raises(ValueError, match="kernel = 'bogus'"):
        ring_attention(q, k, v, mesh=None, kernel="bogus")
    for scale in (0.0, -1.0, float("nan"), float("inf"), "1", True):
        with pytest.raises(ValueError, match=r"scale = .*: must be a finite number above 0"):
            ring_attention(q, k, v, mesh=None, scale=scale)
    for layout in ("striped", Striped, None):
        with pytest.raises(ValueError, match=r"layout = .*must be a Layout"):
            ring_attention(q, k, v, mesh=None, layout=layout)
    for window in (0, -1, 2.0, True, "3"):
        with pytest.raises(ValueError, match=r"window = .*: must be None or an integer, at least"):
            ring_attention(q, k, v, mesh=None, window=window)
    with pytest.raises(ValueError, match="layout = 'striped:4' has no sliding windows: allowed"):
        ring_attention(q, k, v, mesh=None, layout=Striped(4), window=3)
    for sinks in (torch.zeros(2), torch.zeros(4, 1), torch.zeros(4).long()):
        with pytest.raises(ValueError, match=r"sinks must be a floating-point .* shape \(4,\)"):
            ring_attention(q, k, v, mesh=None, sinks=sinks)
    with pytest.raises(ValueError, match="documents must be a Documents, not a list"):
        ring_attention(q, k, v, mesh=None, documents=[[0, 12]])
    with pytest.raises(ValueError, match="mesh must be a DeviceMesh or None, not a str"):
        ring_attention(q, k, v, mesh="cp")
    with pytest.raises(ValueError, match="float16, bfloat16, float32 or float64; got"):
        ring_attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), mesh=None)
    with pytest.raises(ValueError, match="rotate_method = 'alltoall': allowed are 'ring'"):
        ring_attention(q, k, v, mesh=None, rotate_method="alltoall")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn_mask": torch.ones(12, 12)}, "attn_mask = a tensor is not supported"),
        ({"dropout_p": 0.1}, "dropout_p = 0.1 is not supported: attention is causal"),
        ({"is_causal": False}, "is_causal = False is not supported"),
        ({"window_size": 128}, "window_size = 128 is not supported"),
        ({"bias": 1}, "bias = 1 is not supported"),
        ({"enable_gqa": False}, "need enable_gqa = True"),
    ],
)
def test_module_refuses_what_the_ring_does_not_have(arguments, message):
    with pytest.raises(ValueError, match=message):
        RingAttention(None)(*qkv(), **{"enable_gqa": True, **arguments})
    if "enable_gqa" not in arguments:
        with pytest.raises(ValueError, match=message):
            ring_attention(*qkv(), mesh=None, **arguments)


def test_unknown_options_are_refused_when_the_module_is_built():
    with pytest.raises(ValueError, match="rotate_method = 'bogus'"):
        StripedContextParallel(rotate_method="bogus")
    with pytest.raises(ValueError, match="kernel = 'bogus'"):
        StripedContextParallel(kernel="bogus")


def test_custom_op_follows_torchs_rules():
    q, k, v = (x.requires_grad_() for x in qkv())
    documents = torch.tensor([[0, 5, 12], [0, 12, 12]])
    arguments = (q, k, v, documents, "striped:1", "", "", 0.3, "ring", "auto")
    torch.library.opcheck(ops.ring_attention_op, arguments)
    sinks = torch.randn(4, requires_grad=True)
    torch.library.opcheck(ops.ring_attention_op, (*arguments, 3, sinks))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.attention = RingAttention(None)

    def forward(self, q, k, v, documents=None):
        out = self.attention(self.proj(q), k, v, documents=documents, enable_gqa=True)
        return self.proj(out)


def test_forward_mode_differentiation_is_refused():
    query, key, value = random_inputs(1, (2, 1), 8, 4, torch.float64)[:3]
    with pytest.raises(ValueError, match=r"\(jvp\) of ring attention is not supported"):
        torch.func.jvp(lambda x: ring_attention(x, key, value, mesh=None), (query,), (query,))


def test_compile_fullgraph_accepts_the_op():
    torch._dynamo.reset()
    block, (q, k, v) = Block(), qkv()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for documents in (None, Documents.from_cu_seqlens([[0, 5, 12], [0, 12]])):
        want = block(q, k, v, documents)
        got = compiled(q, k, v, documents)
        check_close("out", got.detach(), want.detach())
        want_grad = torch.autograd.grad(want.square().sum(), block.proj.weight)[0]
        got_grad = torch.autograd.grad(got.square().sum(), block.proj.weight)[0]
        check_close("grad", got_grad, want_grad)


def test_selective_checkpointing_can_keep_the_rings_output(monkeypatch):
    forwards = []
    original = ulysses.attention_forward
    monkeypatch.setattr(ulysses, "attention_forward", lambda *a: forwards.append(1) or original(*a))

    def policy(ctx, op, *args, **kwargs):
        if op is torch.ops.striped_cp.ring_attention.default:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def run(**options):
        forwards.clear()
        torch.manual_seed(0)
        block = Block()
        out = checkpoint(block, *qkv(), use_reentrant=False, **options)
        out.square().sum().backward()
        return block.proj.weight.grad, len(forwards)

    kept, calls_kept = run(context_fn=lambda: create_selective_checkpoint_contexts(policy))
    recomputed, calls_recomputed = run()
    assert (calls_kept, calls_recomputed) == (1, 2)
    assert torch.equal(kept, recomputed)


def test_options_at_the_value_that_the_ring_implies_are_accepted():
    q, k, v = qkv()
    plain = ring_attention(q, k, v, mesh=None)
    options = {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "window_size": (-1, -1)}
    assert torch.equal(ring_attention(q, k, v, mesh=None, **options), plain)


def test_the_log_sum_exp_carries_no_gradient():
    q, k, v = (x.requires_grad_() for x in qkv())
    _, lse = ops.ring_attention_op(q, k, v, None, "striped:1", "", "", 0.3, "ring", "auto")
    assert not lse.requires_grad


def test_autocast_leaves_the_op_alone():
    q, k, v = qkv()
    want = ring_attention(q, k, v, mesh=None, kernel="reference")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ring_attention(q, k, v, mesh=None, kernel="reference")
    assert torch.equal(got, want)
