"""The shape of the model in a Hugging Face config.json."""

import json
from pathlib import Path
from typing import Any

from recipes.models.llama3.args import TransformerModelArgs
from recipes.models.llama3.state_dict_adapter import hf_shapes

_GATE = "model.layers.0.mlp.gate_proj.weight"


def model_fields(args: TransformerModelArgs) -> dict[str, Any]:
    """Entries of config.json that a flavor decides."""
    return {
        "model_type": "llama",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": hf_shapes(args)[_GATE][0],
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads or args.n_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
    }


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


def with_defaults(hf: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says, with transformers' defaults for what it leaves out."""
    heads = hf.get("num_attention_heads") or 32
    derived = {
        "num_key_value_heads": heads,
        "head_dim": hf.get("hidden_size", 4096) // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    }
    return derived | {name: value for name, value in hf.items() if value is not None}


def mismatch(hf: dict[str, Any], args: TransformerModelArgs) -> str | None:
    """The first entry of a config.json that a flavor does not fit, as "name = x, ... has y"."""
    found = with_defaults(hf)
    for name, expected in model_fields(args).items():
        if found.get(name) != expected:
            return f"{name} = {found.get(name)}, the flavor has {expected}"
    return None
