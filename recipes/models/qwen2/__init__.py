"""Qwen2.5, dense: `model.name` = "qwen2_striped", as transformers calls its class Qwen2.

Dimensions of the published config.json files (arXiv 2412.15115, table 1). The projections of query,
key and value have a bias, and 0.5B, 1.5B and 3B tie their embeddings.
"""

from functools import partial

from recipes.models.family import ModelFamily
from recipes.models.shapes import ModelShape

_Shape = partial(ModelShape, norm_eps=1e-6, qkv_bias=True)
_LargeShape = partial(ModelShape, norm_eps=1e-5, qkv_bias=True)

QWEN2 = ModelFamily(
    flavors={
        "debugmodel": _Shape(128, 4, 8, 4, 384, 2048, head_dim=16),
        "debugmodel_tied": _Shape(128, 4, 8, 4, 384, 2048, head_dim=16, tied=True),
        "0.5B": _Shape(896, 24, 14, 2, 4864, 151936, head_dim=64, tied=True),
        "1.5B": _Shape(1536, 28, 12, 2, 8960, 151936, tied=True),
        "3B": _Shape(2048, 36, 16, 2, 11008, 151936, tied=True),
        "7B": _Shape(3584, 28, 28, 4, 18944, 152064),
        "14B": _LargeShape(5120, 48, 40, 8, 13824, 152064),
        "32B": _LargeShape(5120, 64, 40, 8, 27648, 152064),
        "72B": _LargeShape(8192, 80, 64, 8, 29568, 152064),
    },
    # Pre-trained to 32,768 tokens with this theta (arXiv 2412.15115, section 3.3).
    theta=1_000_000.0,
    rotates_halves=True,
    architecture="Qwen2ForCausalLM",
    hf_fields={"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False},
    hf_defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    },
)
