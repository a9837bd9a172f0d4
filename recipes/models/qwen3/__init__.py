"""Qwen3, dense: `model.name` = "qwen3_striped".

Dimensions of the published config.json files (arXiv 2505.09388, table 1). Queries and keys are
normalised, heads are wider than dim / heads, and 0.6B, 1.7B and 4B tie their embeddings.
"""

from functools import partial

from recipes.models.family import ModelFamily
from recipes.models.shapes import ModelShape

_Shape = partial(ModelShape, norm_eps=1e-6, qk_norm=True)
_VOCABULARY = 151936

QWEN3 = ModelFamily(
    flavors={
        "debugmodel": _Shape(128, 4, 8, 4, 384, 2048, head_dim=32),
        "debugmodel_tied": _Shape(128, 4, 8, 4, 384, 2048, head_dim=32, tied=True),
        "0.6B": _Shape(1024, 28, 16, 8, 3072, _VOCABULARY, tied=True),
        "1.7B": _Shape(2048, 28, 16, 8, 6144, _VOCABULARY, tied=True),
        "4B": _Shape(2560, 36, 32, 8, 9728, _VOCABULARY, tied=True),
        "8B": _Shape(4096, 36, 32, 8, 12288, _VOCABULARY),
        "14B": _Shape(5120, 40, 40, 8, 17408, _VOCABULARY),
        "32B": _Shape(5120, 64, 64, 8, 25600, _VOCABULARY),
    },
    # Pre-trained to 32,768 tokens with this theta (arXiv 2505.09388, section 3.2).
    theta=1_000_000.0,
    rotates_halves=True,
    architecture="Qwen3ForCausalLM",
    hf_fields={
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
    },
    hf_defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
    },
)
