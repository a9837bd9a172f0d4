"""Which models can run on the ring: by what they are made of, not by their names."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

# Modules, apart from attention, in which one token sees others.
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_LAYERS = ("full_attention", "sliding_attention")
# RoPE whose frequencies depend on the highest position in the input, of which ranks see their own.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Every attention of the model by name: transformers gives each of them `is_causal`."""
    return {name: m for name, m in model.named_modules() if hasattr(m, "is_causal")}


def check_model(model: PreTrainedModel) -> None:
    """Raise ValueError, in one line, for a model with anything but causal attention."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model must be a transformers PreTrainedModel, not {type(model)}")
    for reason in _reasons(model):
        raise ValueError(f"{type(model).__name__} cannot run on the ring: {reason}")


def _reasons(model: PreTrainedModel) -> Iterator[str]:
    config = model.config
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "it has an encoder or cross attention"
    if getattr(config, "attn_logit_softcapping", None):
        yield f"attn_logit_softcapping = {config.attn_logit_softcapping}: must be None"
    if getattr(config, "output_router_logits", False):
        yield (
            "output_router_logits = True: the balancing loss of one rank's tokens is not that of "
            "the batch; set it to False"
        )
    kinds = getattr(config, "layer_types", None)
    for index, kind in enumerate(kinds or ()):
        if kind not in _LAYERS:
            yield f"layer {index} is {kind}; allowed are {', '.join(_LAYERS)}"
    for rope_type in _rope_types(getattr(config, "rope_parameters", None) or {}):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            yield f"rope_type = {rope_type!r}: its frequencies depend on the length of the input"
    attentions = attention_modules(model)
    if not attentions:
        yield "it has no attention that transformers' AttentionInterface reaches"
    for name, attention in attentions.items():
        if not attention.is_causal:
            yield f"{name} is not causal"
    for name, module in model.named_modules():
        if isinstance(module, _MIXERS):
            yield f"{name}, a {type(module).__name__}, mixes tokens outside attention"
        if isinstance(module, GradientCheckpointingLayer) and not any(
            attention.startswith(f"{name}.") for attention in attentions
        ):
            yield f"{name} has no attention"


def _rope_types(parameters: dict) -> Iterator[str]:
    """Of `rope_parameters`, which may hold one set, or one for every type of layer."""
    for value in (parameters, *parameters.values()):
        if isinstance(value, dict) and "rope_type" in value:
            yield value["rope_type"]
