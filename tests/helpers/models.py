"""Models by name, as torchtitan is given them."""

from recipes.models.decoder.args import TransformerModelArgs, args_of
from recipes.models.registry import MODELS


def flavor(size: str, name: str = "llama3_striped") -> TransformerModelArgs:
    family = MODELS[name]
    return args_of(family, family.flavors[size])
