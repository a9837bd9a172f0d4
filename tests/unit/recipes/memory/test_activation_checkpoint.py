"""Checkpointing: the same gradients in every mode, attention computed as often as promised."""

from itertools import pairwise

import pytest
import torch
from torchtitan.config.job_config import ActivationCheckpoint

import striped_cp.ulysses
from recipes.config.schema import Memory
from recipes.memory.activation_checkpoint import apply_activation_checkpointing
from recipes.memory.offload import CheckpointOffload
from recipes.models.decoder.args import args_of
from recipes.models.decoder.model import Transformer
from recipes.models.llama3 import LLAMA3
from recipes.models.shapes import ModelShape
from striped_cp import Documents

LAYERS, SEQ_LEN = 4, 64


def make_model(mlp_chunk_tokens=0, dtype=torch.float32):
    torch.manual_seed(0)
    args = args_of(LLAMA3, ModelShape(64, LAYERS, 8, 4, 384, 100, head_dim=8))
    args.memory = Memory(mlp_chunk_tokens=mlp_chunk_tokens)
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()
    return model.to(dtype)


def run(model):
    """Loss and gradients of a batch of two rows, each of a few documents."""
    torch.manual_seed(1)
    tokens = torch.randint(0, 100, (2, SEQ_LEN))
    documents = Documents.from_cu_seqlens([[0, 17, SEQ_LEN], [0, 40, 41, SEQ_LEN]])
    loss = model(tokens, attention_masks=documents).float().logsumexp(-1).sum()
    loss.backward()
    # Wrappers put their names between those of the parameters.
    return loss.detach(), {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad
        for name, parameter in model.named_parameters()
    }


def checkpointed(mode, option="2", recompute_attention=False, offload=False, **model_options):
    model = make_model(**model_options)
    if offload:
        model.offload = CheckpointOffload()
    apply_activation_checkpointing(
        model,
        ActivationCheckpoint(mode=mode, selective_ac_option=option),
        recompute_attention=recompute_attention,
        offload=model.offload,
        compiled=False,
    )
    return model


@pytest.fixture
def attention_calls(monkeypatch):
    """How often the ring's forward runs."""
    calls = []
    forward = striped_cp.ulysses.attention_forward

    def spy(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(striped_cp.ulysses, "attention_forward", spy)
    return calls


CASES = [
    # mode, option, recompute_attention, offload, times that attention runs
    ("full", "2", False, False, LAYERS),
    ("full", "2", True, False, 2 * LAYERS),
    ("full", "2", False, True, LAYERS),
    ("full", "2", True, True, 2 * LAYERS),
    ("selective", "2", False, False, LAYERS),
    ("selective", "2", True, False, LAYERS + LAYERS // 2),
    ("selective", "2", False, True, LAYERS),
    ("selective", "op", False, False, LAYERS),
    ("selective", "op", True, False, 2 * LAYERS),
]


@pytest.mark.parametrize(("mode", "option", "recompute", "offload", "times"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_gradients_and_attention_runs(
    mode, option, recompute, offload, times, dtype, attention_calls
):
    """Bitwise: a recomputation repeats the same operations in the same dtype."""
    expected_loss, expected = run(make_model(dtype=dtype))
    assert len(attention_calls) == LAYERS
    attention_calls.clear()
    model = checkpointed(mode, option, recompute, offload, dtype=dtype)
    loss, grads = run(model)
    assert len(attention_calls) == times
    assert torch.equal(loss, expected_loss)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("chunk_tokens", [1, 24, 1000])
def test_chunked_mlp(mode, chunk_tokens):
    """Chunks that do not divide the tokens, and one chunk for all."""
    expected_loss, expected = run(make_model())
    model = make_model(mlp_chunk_tokens=chunk_tokens)
    if mode == "full":
        model = checkpointed("full", mlp_chunk_tokens=chunk_tokens)
    loss, grads = run(model)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6)


def test_every_second_block_is_wrapped():
    wrapped = [
        "_checkpoint_wrapped_module" in dict(block.named_children())
        for block in checkpointed("selective", "2").layers.values()
    ]
    assert wrapped == [False, True, False, True]


def test_state_dict_names_do_not_change():
    assert checkpointed("full", mlp_chunk_tokens=8).state_dict().keys() == (
        make_model().state_dict().keys()
    )


def test_the_small_result_leaves_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a store returns, the compute stream waits for the copy of the one before."""
    sizes = []
    store = CheckpointOffload.store

    def record(self, tensor):
        sizes.append(tensor.nbytes)
        return store(self, tensor)

    monkeypatch.setattr(CheckpointOffload, "store", record)
    model = checkpointed("full", offload=True)
    model(torch.randint(0, 100, (2, SEQ_LEN)), Documents.from_cu_seqlens([[0, SEQ_LEN]] * 2))
    of_attention = [(a, b) for a, b in pairwise(sizes) if a * 8 == b]
    assert len(of_attention) == LAYERS  # lse (B, H, S), out (B, S, H, 8)
