"""The models that a recipe can name: one folder and one line each."""

from recipes.config.schema import StripedJobConfig
from recipes.models.family import ModelFamily
from recipes.models.llama3 import LLAMA3
from recipes.models.qwen2 import QWEN2
from recipes.models.qwen3 import QWEN3
from recipes.models.shapes import ModelShape

# By `model.name`.
MODELS: dict[str, ModelFamily] = {
    "llama3_striped": LLAMA3,
    "qwen2_striped": QWEN2,
    "qwen3_striped": QWEN3,
}


def family_of(config: StripedJobConfig) -> ModelFamily:
    return MODELS[config.model.name]


def shape_of(config: StripedJobConfig) -> ModelShape:
    return family_of(config).flavors[config.model.flavor]
