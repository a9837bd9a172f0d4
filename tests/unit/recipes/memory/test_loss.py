"""Chunked loss: the same loss and gradients as logits at once, in the memory of one chunk."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.components.loss import cross_entropy_loss

from recipes.memory.loss import LossHead

BATCH, SEQ_LEN, DIM, VOCAB, CHUNK = 2, 256, 32, 1000, 64


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.numel = max(self.numel, leaf.numel())
        return out


def problem(dtype=torch.float32, ignored=0.3):
    torch.manual_seed(0)
    hidden = torch.randn(BATCH, SEQ_LEN, DIM).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (BATCH, SEQ_LEN))
    labels[torch.rand(BATCH, SEQ_LEN) < ignored] = -100
    head = LossHead(DIM, VOCAB, CHUNK).to(dtype)
    return head, hidden, labels


def gradients(loss, head, hidden):
    return torch.autograd.grad(loss / 7, [hidden, head.weight])


@pytest.mark.parametrize("chunk_tokens", [1, 64, 100, 10_000])
@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_equals_logits_at_once(chunk_tokens, ignored):
    head, hidden, labels = problem(ignored=ignored)
    head.chunk_tokens = chunk_tokens
    expected = cross_entropy_loss(head(hidden), labels)
    loss = head(hidden, labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for actual, wanted in zip(
        gradients(loss, head, hidden), gradients(expected, head, hidden), strict=True
    ):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_logits_are_never_whole():
    """Forward and backward: no tensor of B*S*V elements, nor of more than a chunk's logits."""
    head, hidden, labels = problem()
    with LargestTensor() as spy:
        gradients(head(hidden, labels), head, hidden)
    assert spy.numel == CHUNK * VOCAB
    with LargestTensor() as spy:
        gradients(cross_entropy_loss(head(hidden), labels), head, hidden)
    assert spy.numel == BATCH * SEQ_LEN * VOCAB


def test_keeps_gradients_and_nothing_else_for_backward():
    """Saved: one gradient the size of the hidden states, one the size of the weight."""
    head, hidden, labels = problem()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.nbytes) or t, lambda t: t
    ):
        head(hidden, labels)
    assert sum(saved) == BATCH * SEQ_LEN * DIM * 4 + VOCAB * DIM * 4


def test_all_labels_ignored():
    head, hidden, labels = problem(ignored=1.1)
    loss = head(hidden, labels)
    assert loss == 0.0
    assert all(torch.count_nonzero(g) == 0 for g in gradients(loss, head, hidden))


def test_bfloat16_is_as_exact_as_the_plain_path():
    """Loss in float32; errors against float64 as with logits at once, plus one more rounding:
    the gradient of the hidden states is rounded before and after it is scaled."""
    head, hidden, labels = problem(torch.bfloat16)
    truth = cross_entropy_float64(head, hidden, labels)
    plain_loss = cross_entropy_loss(head(hidden), labels)
    plain = gradients(plain_loss, head, hidden)
    head.chunk_tokens = 8
    loss = head(hidden, labels)
    chunked = gradients(loss, head, hidden)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain_loss, rtol=1e-5, atol=0)
    for name, exact, once, chunks in zip(("hidden", "weight"), truth, plain, chunked, strict=True):
        assert chunks.dtype == torch.bfloat16
        error = [(g.double() - exact).norm() / exact.norm() for g in (once, chunks)]
        assert error[1] <= 1.5 * error[0], name


def cross_entropy_float64(head, hidden, labels):
    hidden64 = hidden.detach().double().requires_grad_()
    weight64 = head.weight.detach().double().requires_grad_()
    loss = F.cross_entropy(
        F.linear(hidden64, weight64).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return torch.autograd.grad(loss / 7, [hidden64, weight64])


def test_validation_makes_no_gradients():
    head, hidden, labels = problem()
    with torch.no_grad(), LargestTensor() as spy:
        loss = head(hidden, labels)
    assert not loss.requires_grad
    assert spy.numel == CHUNK * VOCAB
    torch.testing.assert_close(loss, cross_entropy_loss(head(hidden), labels).detach())


def test_second_backward_needs_the_same_gradient():
    """Zero-bubble pipelines run backward once for the inputs and once for the weights."""
    head, hidden, labels = problem()
    loss = head(hidden, labels)
    expected = torch.autograd.grad(loss / 2, [hidden, head.weight], retain_graph=True)
    again = torch.autograd.grad(loss / 2, [hidden, head.weight], retain_graph=True)
    torch.testing.assert_close(again, expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="with another gradient"):
        loss.backward()


def test_under_autocast():
    """A single device without FSDP: float32 parameters, products in bfloat16."""
    head, hidden, labels = problem()
    with torch.autocast("cpu", torch.bfloat16):
        expected = cross_entropy_loss(head(hidden), labels)
        loss = head(hidden, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    for actual, wanted in zip(
        gradients(loss, head, hidden), gradients(expected, head, hidden), strict=True
    ):
        assert actual.dtype == torch.float32
        assert (actual - wanted).norm() < 0.01 * wanted.norm()


def test_state_dict_is_that_of_a_linear():
    assert list(LossHead(DIM, VOCAB, CHUNK).state_dict()) == ["weight"]


@pytest.mark.slow
def test_compiled_chunks_give_the_same_loss():
    head, hidden, labels = problem()
    expected = head(hidden, labels)
    wanted = gradients(expected, head, hidden)
    head.compile_loss("inductor")
    loss = head(hidden, labels)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients(loss, head, hidden), wanted)
