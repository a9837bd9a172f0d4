"""RoPE: frequencies and cos/sin against Hugging Face, only local positions, refusals."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from recipes.config.schema import Rope
from recipes.models.decoder.rope import (
    apply_rotations,
    attention_temperature,
    check_sequence_length,
    inverse_frequencies,
    longest_sequence,
    rotations,
)
from recipes.models.decoder.rope_config import write_rope
from recipes.models.llama3 import LLAMA3

HEAD_DIM = 128


def hugging_face_config(settings):
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=2**20,
        **write_rope(settings),
    )


SETTINGS = {
    "llama-3": Rope(scaling="none"),
    "gradient-1m": Rope(scaling="none", theta=2.8e9),
    "llama-3.1": Rope(),
    "llama-3.2": Rope(scaling_factor=32.0),
    "ultralong-1m": Rope(scaling="yarn", scaling_factor=128.0),
    "ultralong-1m, no temperature": Rope(
        scaling="yarn", scaling_factor=128.0, attention_temperature=False
    ),
    "yarn paper": Rope(scaling="yarn", scaling_factor=16.0, high_freq_factor=32.0, theta=10000.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_and_temperature_equal_hugging_face(name):
    settings = SETTINGS[name]
    config = hugging_face_config(settings)
    if settings.scaling == "none":
        expected, factor = LlamaRotaryEmbedding(config).inv_freq, 1.0
    else:
        expected, factor = ROPE_INIT_FUNCTIONS[settings.scaling](config, "cpu")
    torch.testing.assert_close(
        inverse_frequencies(settings, HEAD_DIM), expected.double(), rtol=1e-6, atol=0
    )
    assert attention_temperature(settings) == pytest.approx(factor, rel=1e-12)


def test_literal_values():
    """Values worked out by hand: the fastest pair is kept, the slowest stretched."""
    llama3 = inverse_frequencies(Rope(), HEAD_DIM)
    assert llama3[0] == 1.0
    assert llama3[-1].item() == pytest.approx(500_000 ** (-126 / 128) / 8)
    assert attention_temperature(SETTINGS["ultralong-1m"]) == pytest.approx(1.4852030264)
    assert attention_temperature(SETTINGS["ultralong-1m, no temperature"]) == 1.0
    assert attention_temperature(SETTINGS["llama-3.1"]) == 1.0


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("rows", [1, 2])
def test_rotation_equals_hugging_face(name, rows):
    """Hugging Face rotates halves, Meta rotates neighbours: same numbers in another order."""
    torch.manual_seed(0)
    settings = SETTINGS[name]
    x = torch.randn(2, 6, 4, HEAD_DIM)
    positions = torch.tensor([[0, 3, 6, 9, 300, 4095], [1, 2, 3, 0, 1, 2]])[:rows]
    rotation = rotations(settings, HEAD_DIM, positions)
    interleaved = apply_rotations(x, rotation, halves=False)

    embedding = LlamaRotaryEmbedding(hugging_face_config(settings))
    cos, sin = embedding(x, positions.expand(2, -1))
    halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2).transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(halves, halves, cos, sin)
    expected = expected.transpose(1, 2).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    # Hugging Face's float32 angles are off by up to 4095 * 2**-24 rad.
    torch.testing.assert_close(interleaved, expected, rtol=0, atol=2e-3)

    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    own_order = apply_rotations(x, rotation, halves=True)
    torch.testing.assert_close(own_order, expected.transpose(1, 2), rtol=0, atol=2e-3)


def test_far_positions_are_exact():
    """Position 131071 and 2**20 - 1 against float64, whatever dtype the model trains in."""
    positions = torch.tensor([[131_071, 2**20 - 1]])
    table = rotations(Rope(), HEAD_DIM, positions)
    assert table.dtype == torch.complex64
    angles = positions.double()[0, :, None] * inverse_frequencies(Rope(), HEAD_DIM)
    expected = torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(table[0, :, 0].to(torch.complex128), expected, rtol=0, atol=1e-6)


def test_rotation_is_relative():
    """Scores depend on distances alone, also where positions restart within a row."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 1, HEAD_DIM).double(), torch.randn(1, 1, 1, HEAD_DIM).double()

    def score(query_position, key_position):
        def rotate(x, p):
            return apply_rotations(x, rotations(Rope(), HEAD_DIM, torch.tensor([[p]])), False)

        return (rotate(q, query_position) * rotate(k, key_position)).sum()

    torch.testing.assert_close(score(900_007, 900_000), score(7, 0), rtol=1e-5, atol=1e-5)


def test_only_local_positions_are_computed():
    """A striped rank of 4 holds 4 of 16 rows, equal to those rows of the full table."""
    full = rotations(Rope(), 16, torch.arange(16)[None])
    local = rotations(Rope(), 16, torch.arange(1, 16, 4)[None])
    assert local.shape == (1, 4, 1, 8)
    assert local.untyped_storage().nbytes() == 4 * 8 * 8
    torch.testing.assert_close(local, full[:, 1::4], rtol=0, atol=0)


def test_bfloat16_activations_keep_their_dtype():
    x = torch.randn(1, 4, 2, 16).bfloat16()
    out = apply_rotations(x, rotations(Rope(), 16, torch.arange(4)[None]), halves=False)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out[:, 0], x[:, 0])


@pytest.mark.parametrize(
    ("settings", "longest"),
    [
        (Rope(scaling="none"), 8192),
        (Rope(), 131_072),
        (Rope(scaling="yarn", scaling_factor=32.0), 262_144),
        (Rope(scaling="yarn", scaling_factor=128.0), 1_048_576),
        # 8192 * 30.592 ** (126 / 128), for Gradient's first stage of 65536 tokens.
        (Rope(scaling="none", theta=15.296e6), 237_568),
    ],
)
def test_longest_sequence(settings, longest):
    assert longest_sequence(settings, HEAD_DIM, LLAMA3.theta) == pytest.approx(longest, rel=1e-3)
    check_sequence_length(
        settings, HEAD_DIM, LLAMA3.theta, longest_sequence(settings, HEAD_DIM, LLAMA3.theta)
    )


def test_longer_sequences_are_refused_unless_wanted():
    with pytest.raises(ValueError, match=r"seq_len = 1048576 .* 131072 .*rope\.extrapolate = true"):
        check_sequence_length(Rope(), HEAD_DIM, LLAMA3.theta, 2**20)
    check_sequence_length(Rope(extrapolate=True), HEAD_DIM, LLAMA3.theta, 2**20)


def test_published_lengths_are_within_reach():
    """Every (theta, length) that was published for Llama-3 passes the rule."""
    published = [
        (15.3e6, 65_536), (207.1e6, 262_144), (1.06e9, 524_288), (2.80e9, 1_048_576),
        (8e6, 65_536), (1.28e8, 524_288),
    ]  # fmt: skip
    for theta, length in published:
        check_sequence_length(Rope(scaling="none", theta=theta), HEAD_DIM, LLAMA3.theta, length)
    assert math.isclose(longest_sequence(Rope(scaling="none"), HEAD_DIM, LLAMA3.theta), 8192)
