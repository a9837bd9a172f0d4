"""Rotary position embeddings for sequences of up to millions of tokens.

Three recipes for the inverse frequencies, selected by `[rope] scaling`:

- "none": theta alone (Su et al., arXiv 2104.09864); longer contexts come from a larger theta, as
  in "Effective Long-Context Scaling" (Xiong et al., arXiv 2309.16039).
- "llama3": Llama-3.1's rescaling: wavelengths longer than `original / low_freq_factor` are
  stretched by `scaling_factor`, those shorter than `original / high_freq_factor` are kept.
- "yarn": the NTK-by-parts ramp of YaRN (Peng et al., arXiv 2309.00071, section 3.2) between
  `low_freq_factor` (its alpha) and `high_freq_factor` (its beta) rotations, plus the attention
  temperature of its section 3.3.

The rotations are computed for the positions a rank holds and for no others: at 1M tokens a table
of every position is 512 MiB, and each of P ranks needs 1/P of it.
"""

import math

import torch

from recipes.config.schema import Rope

# Meta trains 131072 = 2 * 8 * 8192 tokens with scaling factor 8 (Llama-3.1).
LLAMA3_REACH = 2.0


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per token of every rotated pair.

    Returns:
        float64 CPU tensor (head_dim / 2,), fastest first.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = rope.theta**-exponents
    if rope.scaling == "llama3":
        return _llama3(rope, frequencies)
    if rope.scaling == "yarn":
        return _yarn(rope, frequencies, head_dim)
    return frequencies


def _llama3(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Llama-3.1's rescaling; the ramp is linear in rotations over the original context."""
    rotations = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(frequencies / rope.scaling_factor, frequencies, ramp.clamp(0, 1))


def _yarn(rope: Rope, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """YaRN as its authors and Hugging Face implement it.

    The ramp is linear in the index of the pair, not in rotations as in the paper's equation 18,
    and its ends are rounded outwards to whole indices.
    """

    def index(rotations: float) -> float:
        context = rope.original_max_position_embeddings / (2 * math.pi * rotations)
        return head_dim * math.log(context) / (2 * math.log(rope.theta))

    first = max(math.floor(index(rope.high_freq_factor)), 0)
    last = min(math.ceil(index(rope.low_freq_factor)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    ramp = (pairs - first) / max(last - first, 0.001)
    return torch.lerp(frequencies, frequencies / rope.scaling_factor, ramp.clamp(0, 1))


def attention_temperature(rope: Rope) -> float:
    """Factor on both queries and keys: YaRN's sqrt(1/t) = 0.1 ln(s) + 1 (equation 22), else 1."""
    if rope.scaling != "yarn" or not rope.attention_temperature:
        return 1.0
    return 0.1 * math.log(max(rope.scaling_factor, 1.0)) + 1.0


def rotations(rope: Rope, head_dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Rotation of every pair at this rank's positions, shared by all layers of a forward pass.

    Angles are float64: at position 2**20 a float32 angle is off by up to 0.06 rad.

    Args:
        positions: int64 (1 or B, S/P): global position of every local token.

    Returns:
        complex64 (1 or B, S/P, 1, head_dim / 2) on the device of positions. Complex, so that FSDP's
        mixed precision, which casts floating-point inputs of a block to bfloat16, leaves it alone.
    """
    frequencies = inverse_frequencies(rope, head_dim).to(positions.device)
    angles = positions.to(torch.float64)[:, :, None, None] * frequencies
    radius = torch.tensor(attention_temperature(rope), dtype=torch.float32, device=angles.device)
    # Reduced to one turn in float64, the angle survives the rounding to float32.
    turn = torch.remainder(angles, 2 * math.pi).to(torch.float32)
    return torch.polar(radius.expand_as(turn), turn)


def apply_rotations(x: torch.Tensor, rotation: torch.Tensor, halves: bool) -> torch.Tensor:
    """Rotate the pairs of every head.

    Args:
        x: (B, S/P, H, D), any float dtype.
        rotation: complex64 (1 or B, S/P, 1, D / 2).
        halves: (x0, x[D/2]), (x1, x[D/2 + 1]), ... as in transformers; otherwise neighbours
            (x0, x1), (x2, x3), ..., the layout of Meta's checkpoints.

    Returns:
        (B, S/P, H, D) in the dtype of x; the product is taken in float32.
    """
    first, second = x.chunk(2, dim=-1) if halves else x.unflatten(-1, (-1, 2)).unbind(-1)
    # Real numbers: torch.compile makes no fused code of complex ones (torch 2.13).
    cos, sin = torch.view_as_real(rotation).unbind(-1)
    turned = (first * cos - second * sin).type_as(x), (first * sin + second * cos).type_as(x)
    return torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)


def longest_sequence(rope: Rope, head_dim: int, pretrained_theta: float) -> int:
    """Tokens up to which these settings are meant to be trained or used.

    `original_max_position_embeddings`, times the scaling factor (twice that for "llama3": see
    LLAMA3_REACH), times what a theta above that of pre-training stretches: NTK-aware scaling solved
    for the length, (theta / pretrained_theta) ** ((D - 2) / D) (arXiv 2309.00071, equation 14). A
    smaller theta is that of another pre-training, whose length `original_max_position_embeddings`
    is.
    """
    stretch = max(rope.theta / pretrained_theta, 1.0) ** ((head_dim - 2) / head_dim)
    if rope.scaling == "llama3":
        stretch *= LLAMA3_REACH * rope.scaling_factor
    elif rope.scaling == "yarn":
        stretch *= rope.scaling_factor
    return round(rope.original_max_position_embeddings * stretch)


def check_sequence_length(rope: Rope, head_dim: int, pretrained_theta: float, seq_len: int) -> None:
    """Refuse sequences that the settings were never meant for.

    Raises:
        ValueError: unless rope.extrapolate says that this is wanted.
    """
    longest = longest_sequence(rope, head_dim, pretrained_theta)
    if seq_len > longest and not rope.extrapolate:
        raise ValueError(
            f"training.seq_len = {seq_len} is longer than the {longest} tokens that [rope] is "
            f"meant for (theta = {rope.theta:g}, scaling = {rope.scaling!r}, scaling_factor = "
            f"{rope.scaling_factor:g}, original_max_position_embeddings = "
            f"{rope.original_max_position_embeddings}): raise theta or scaling_factor, or set "
            "rope.extrapolate = true"
        )
