"""Models by name: as torchtitan is given them, as the settings of a run name them."""

from dataclasses import replace

from recipes.models.decoder.args import TransformerModelArgs, args_of
from recipes.models.family import ModelFamily
from recipes.models.registry import MODELS
from recipes.models.shapes import ModelShape

# A family of a user's own, which nothing but the registry is told of.
TOY = ModelFamily(
    flavors={
        "debugmodel": ModelShape(
            96, 4, 6, 2, 256, 2048, head_dim=24, norm_eps=1e-4, qk_norm=True, qkv_bias=True
        )
    },
    theta=10_000.0,
    rotates_halves=False,
    architecture="ToyForCausalLM",
    hf_fields={"model_type": "toy"},
    hf_defaults={"num_attention_heads": 6},
)

# The same with windows that end inside documents and ranks, and one that is longer than most.
TOY_WINDOWS = replace(
    TOY,
    flavors={"debugmodel": replace(TOY.flavors["debugmodel"], windows=(9, None, 25))},
)


def flavor(size: str, name: str = "llama3_striped") -> TransformerModelArgs:
    family = MODELS[name]
    return args_of(family, family.flavors[size])


def name_settings(name: str = "llama3_striped", tied: bool = False) -> tuple[str, ...]:
    """The settings of a run that name a small model."""
    return "--model.name", name, "--model.flavor", "debugmodel_tied" if tied else "debugmodel"
