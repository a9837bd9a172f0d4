"""LLaMA 3, 3.1 and 3.2: `model.name` = "llama3_striped".

Meta's published dimensions: Llama 3 (arXiv 2407.21783, table 3), and Llama 3.2 for 1B and 3B, whose
embeddings are tied.
"""

from recipes.models.family import ModelFamily
from recipes.models.shapes import ModelShape

LLAMA3 = ModelFamily(
    flavors={
        "debugmodel": ModelShape(128, 4, 8, 4, 384, 2048, head_dim=16),
        "debugmodel_tied": ModelShape(128, 4, 8, 4, 384, 2048, head_dim=16, tied=True),
        "1B": ModelShape(2048, 16, 32, 8, 8192, 128256, head_dim=64, tied=True),
        "3B": ModelShape(3072, 28, 24, 8, 8192, 128256, tied=True),
        "8B": ModelShape(4096, 32, 32, 8, 14336, 128256),
        "70B": ModelShape(8192, 80, 64, 8, 28672, 128256),
        "405B": ModelShape(16384, 126, 128, 8, 53248, 128256),
    },
    # Pre-trained at 8192 tokens with this theta (arXiv 2407.21783, section 3.2).
    theta=500_000.0,
    rotates_halves=False,
    architecture="LlamaForCausalLM",
    hf_fields={
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    },
    hf_defaults={
        "num_attention_heads": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
    },
)
