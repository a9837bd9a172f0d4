"""RoPE settings in a Hugging Face config.json, to and from `[rope]`.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 one table `rope_parameters`
with both in it. Both are read; the older spelling is written, which both versions read.
"""

import dataclasses
import math
from typing import Any

from recipes.config.schema import Rope
from recipes.models.decoder.rope import attention_temperature, longest_sequence

# What transformers assumes where a file does not say.
_DEFAULT_THETA = 10_000.0
_DEFAULT_MAX_POSITIONS = 2048
# YaRN's ramp in rotations, by the names of the paper and of transformers.
_YARN_BETA_FAST, _YARN_BETA_SLOW = 32.0, 1.0

# The fields of `[rope]` that decide the rotations, by scaling.
_UNSCALED = ("theta", "scaling")
_RAMP = (
    "scaling_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)
FIELDS = {
    "none": _UNSCALED,
    "llama3": (*_UNSCALED, *_RAMP),
    "yarn": (*_UNSCALED, *_RAMP, "attention_temperature"),
}


def max_positions(hf: dict[str, Any]) -> int:
    """Tokens that the model was made for, according to its config.json."""
    return int(hf.get("max_position_embeddings", _DEFAULT_MAX_POSITIONS))


def read_rope(hf: dict[str, Any], base: Rope, head_dim: int, pretrained_theta: float) -> Rope:
    """`base` with what a config.json says.

    Raises:
        ValueError: a kind of scaling that `[rope]` cannot express.
    """
    table = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = table.get("rope_type", table.get("type", "default"))
    theta = float(table.get("rope_theta", hf.get("rope_theta", _DEFAULT_THETA)))
    if table.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor: only whole heads are rotated here")
    if kind == "default":
        rope = dataclasses.replace(base, theta=theta, scaling="none")
        return _unscaled(rope, max_positions(hf), head_dim, pretrained_theta)
    if kind not in ("llama3", "yarn"):
        raise ValueError(f'rope_type "{kind}": known here are "default", "llama3" and "yarn"')
    original = table.get("original_max_position_embeddings") or max_positions(hf)
    rope = dataclasses.replace(
        base, theta=theta, scaling=kind, original_max_position_embeddings=int(original)
    )
    if kind == "llama3":
        rope.scaling_factor = float(table["factor"])
        rope.low_freq_factor = float(table["low_freq_factor"])
        rope.high_freq_factor = float(table["high_freq_factor"])
        return rope
    return _yarn(rope, table, max_positions(hf) / original)


def _unscaled(rope: Rope, positions: int, head_dim: int, pretrained_theta: float) -> Rope:
    """The original length is chosen so that `longest_sequence` is the file's."""
    longest = longest_sequence(rope, head_dim, pretrained_theta)
    stretch = longest / rope.original_max_position_embeddings
    rope.original_max_position_embeddings = max(round(positions / stretch), 1)
    return rope


def _yarn(rope: Rope, table: dict[str, Any], stretch: float) -> Rope:
    if table.get("mscale") or table.get("mscale_all_dim"):
        raise ValueError("rope scaling has mscale: DeepSeek's temperature is not supported")
    if not table.get("truncate", True):
        raise ValueError("rope scaling has truncate = false, which is not supported")
    rope.scaling_factor = float(table.get("factor") or stretch)
    rope.high_freq_factor = float(table.get("beta_fast") or _YARN_BETA_FAST)
    rope.low_freq_factor = float(table.get("beta_slow") or _YARN_BETA_SLOW)
    usual = attention_temperature(dataclasses.replace(rope, attention_temperature=True))
    factor = table.get("attention_factor")
    factor = usual if factor is None else float(factor)
    if not math.isclose(factor, usual, rel_tol=1e-6) and factor != 1.0:
        raise ValueError(f"attention_factor {factor}: only 1 and YaRN's {usual:.4f} are supported")
    rope.attention_temperature = factor != 1.0 or usual == 1.0
    return rope


def write_rope(rope: Rope) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config.json."""
    if rope.scaling == "none":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {
        "rope_type": rope.scaling,
        "factor": rope.scaling_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    if rope.scaling == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    else:
        scaling["beta_fast"] = rope.high_freq_factor
        scaling["beta_slow"] = rope.low_freq_factor
        if not rope.attention_temperature:
            scaling["attention_factor"] = 1.0
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
