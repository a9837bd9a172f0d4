"""The shape of the model in a Hugging Face config.json."""

import json
from pathlib import Path
from typing import Any

from recipes.models.family import ModelFamily
from recipes.models.shapes import ModelShape


def model_fields(family: ModelFamily, shape: ModelShape) -> dict[str, Any]:
    """Entries of config.json that a flavor decides.

    Raises:
        ValueError: layers have several windows, config.json has room for one.
    """
    windows = {}
    if shape.windowed:
        sizes = _window_sizes(shape)
        if len(sizes) > 1:
            raise ValueError(f"windows of {sizes} tokens: config.json has room for one size")
        windows = {"sliding_window": sizes[0], "layer_types": _layer_types(shape)}
    return {
        **family.hf_fields,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": shape.ffn_dim,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "tie_word_embeddings": shape.tied,
        **windows,
    }


def _window_sizes(shape: ModelShape) -> list[int]:
    return sorted(window for window in shape.layers_by_window if window is not None)


def _layer_types(shape: ModelShape) -> list[str]:
    windows = map(shape.window, range(shape.n_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


_INTEGERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)


def check_numbers(hf: dict[str, Any], path: Path) -> None:
    """Check that a config.json has numbers where this project computes with them.

    Raises:
        ValueError: one line.
    """
    for name in _INTEGERS:
        value = hf.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{path}: {name} = {json.dumps(value)}: allowed: positive integers")


def mismatch(hf: dict[str, Any], family: ModelFamily, shape: ModelShape) -> str | None:
    """The first entry of a config.json that a flavor does not fit, as "name = x, ... has y"."""
    if len(_window_sizes(shape)) > 1:
        found_window = json.dumps(hf.get("sliding_window"))
        return f"sliding_window = {found_window}, the flavor has {_window_sizes(shape)}"
    heads = hf.get("num_attention_heads") or family.hf_defaults["num_attention_heads"]
    derived = {
        "num_key_value_heads": heads,
        "head_dim": hf.get("hidden_size", 4096) // heads,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * (hf.get("num_hidden_layers") or 0),
    }
    written = {name: value for name, value in hf.items() if value is not None}
    found = derived | dict(family.hf_defaults) | written
    expected_fields = model_fields(family, shape) | {"layer_types": _layer_types(shape)}
    for name, expected in expected_fields.items():
        if found.get(name) != expected:
            return f"{name} = {json.dumps(found.get(name))}, the flavor has {json.dumps(expected)}"
    return None
