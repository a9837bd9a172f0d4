"""Random tiny models made by `transformers`, of the shape of the flavors "debugmodel"."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests import ROOT

TOKENIZER = ROOT / "assets" / "tokenizer"

# RoPE settings as transformers 5 spells them, and as the command line of a run does.
ROPE: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "none": (
        {"rope_type": "default", "rope_theta": 500_000.0},
        ("--rope.theta", "500000", "--rope.scaling", "none"),
    ),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        (
            *("--rope.theta", "500000", "--rope.scaling", "llama3"),
            *("--rope.scaling_factor", "32", "--rope.low_freq_factor", "1"),
            *("--rope.high_freq_factor", "4", "--rope.original_max_position_embeddings", "64"),
        ),
    ),
    "yarn": (
        {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 64,
        },
        (
            *("--rope.theta", "10000", "--rope.scaling", "yarn"),
            *("--rope.scaling_factor", "16", "--rope.low_freq_factor", "1"),
            *("--rope.high_freq_factor", "32", "--rope.original_max_position_embeddings", "64"),
        ),
    ),
}


FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama3_striped": (LlamaConfig, LlamaForCausalLM, {"rms_norm_eps": 1e-5}),
    "qwen2_striped": (Qwen2Config, Qwen2ForCausalLM, {"rms_norm_eps": 1e-6}),
    "qwen3_striped": (Qwen3Config, Qwen3ForCausalLM, {"rms_norm_eps": 1e-6, "head_dim": 32}),
}


def make_model(
    rope: str = "none", *, name: str = "llama3_striped", tied: bool = False, **changes: Any
) -> PreTrainedModel:
    """8 query and 4 key heads, 4 layers; weights large enough for predictions to differ."""
    torch.manual_seed(0)
    config_class, model_class, of_family = FAMILIES[name]
    settings: dict[str, Any] = {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2048,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.1,
        "rope_parameters": ROPE[rope][0],
    }
    model = model_class(config_class(**(settings | of_family | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases, which begin at 1 and 0
                parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def save_model(folder: Path, model: PreTrainedModel, max_shard_size: str = "5GB") -> Path:
    """The folder as one downloads it: weights, config.json, tokenizer."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(TOKENIZER / file, folder / file)
    return folder


def load_model(folder: Path) -> PreTrainedModel:
    """As a user loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()
