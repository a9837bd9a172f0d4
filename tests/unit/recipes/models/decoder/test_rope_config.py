"""RoPE settings of a config.json: both spellings read, transformers agrees with what is written."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from recipes.config.schema import Rope
from recipes.models.decoder.rope import attention_temperature, inverse_frequencies, longest_sequence
from recipes.models.decoder.rope_config import read_rope, write_rope
from recipes.models.llama3 import LLAMA3

HEAD_DIM = 64
LLAMA32 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA31 = LLAMA32 | {"factor": 8.0}


def hf_frequencies(hf: dict) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(hidden_size=4 * HEAD_DIM, num_attention_heads=4, head_dim=HEAD_DIM, **hf)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        return 1.0 / config.rope_parameters["rope_theta"] ** exponents, 1.0
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_theta": 500_000.0, "max_position_embeddings": 8192},
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA31, "max_position_embeddings": 131072},
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA32, "max_position_embeddings": 131072},
        {"rope_parameters": LLAMA32 | {"rope_theta": 500_000.0}},
        {
            "rope_theta": 1e6,
            "rope_scaling": {
                "type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        },
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 128.0,
                "beta_fast": 4.0,
                "beta_slow": 1.0,
                "attention_factor": 1.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ],
    ids=["llama3", "3.1", "3.2", "3.2-new", "yarn-old", "yarn-new"],
)
def test_frequencies_are_those_of_transformers(hf: dict) -> None:
    rope = read_rope(hf, Rope(), HEAD_DIM, LLAMA3.theta)
    for again in (hf, write_rope(rope) | {"max_position_embeddings": 131072}):
        frequencies, factor = hf_frequencies(again)
        torch.testing.assert_close(
            inverse_frequencies(rope, HEAD_DIM).float(), frequencies, rtol=1e-5, atol=0
        )
        assert attention_temperature(rope) == pytest.approx(factor)


def test_fields_of_a_known_file() -> None:
    rope = read_rope(
        {"rope_theta": 500_000.0, "rope_scaling": LLAMA32, "max_position_embeddings": 131072},
        Rope(extrapolate=True),
        HEAD_DIM,
        LLAMA3.theta,
    )
    assert rope == Rope(
        theta=500_000.0,
        scaling="llama3",
        scaling_factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        extrapolate=True,
    )


@pytest.mark.parametrize(("theta", "positions"), [(1e4, 4096), (5e5, 8192), (2.8e9, 1048576)])
def test_unscaled_settings_reach_as_far_as_the_file_says(theta: float, positions: int) -> None:
    hf = {"rope_theta": theta, "max_position_embeddings": positions}
    rope = read_rope(hf, Rope(), HEAD_DIM, LLAMA3.theta)
    assert longest_sequence(rope, HEAD_DIM, LLAMA3.theta) == pytest.approx(positions, rel=0.01)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, 'rope_type "dynamic"'),
        ({"type": "linear", "factor": 2.0}, 'rope_type "linear"'),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0}, "mscale"),
        ({"rope_type": "yarn", "factor": 4.0, "attention_factor": 2.0}, "attention_factor 2.0"),
        ({"rope_type": "yarn", "factor": 4.0, "truncate": False}, "truncate"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_cannot_be_expressed_is_refused(table: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope({"rope_scaling": table}, Rope(), HEAD_DIM, LLAMA3.theta)
