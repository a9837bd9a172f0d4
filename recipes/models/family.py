"""What one family of models is, in numbers and names: no module of torch is needed to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from recipes.models.shapes import ModelShape


@dataclass(frozen=True)
class ModelFamily:
    """Decoders of one architecture.

    Attributes:
        flavors: sizes by `model.flavor`.
        theta: of RoPE in pre-training; a larger one is for longer sequences.
        rotates_halves: RoPE turns the pairs (0, D/2), (1, D/2 + 1), ... of a head, as transformers
            does. Otherwise it turns neighbours, as Meta does, and the rows of the query and key
            projections are reordered between the two.
        architecture: name of the class in transformers.
        hf_fields: entries of config.json that all flavors share.
        hf_defaults: what transformers assumes where a config.json leaves an entry out.
    """

    flavors: Mapping[str, ModelShape]
    theta: float
    rotates_halves: bool
    architecture: str
    hf_fields: Mapping[str, Any]
    hf_defaults: Mapping[str, Any]
