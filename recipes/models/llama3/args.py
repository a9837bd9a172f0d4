"""Sizes of the model, and what of the job's configuration its modules need."""

from dataclasses import dataclass, field

from torchtitan.models.llama3.model import args as titan

from recipes.config.schema import Memory, Rope, StripedJobConfig
from recipes.titan import JobConfig


@dataclass
class TransformerModelArgs(titan.TransformerModelArgs):
    """torchtitan's, with the `[rope]` section in place of its fixed scaling, and `[memory]`."""

    rope_scaling_args: None = None
    rope: Rope = field(default_factory=Rope)
    memory: Memory = field(default_factory=Memory)
    kernel: str = "auto"

    def __post_init__(self) -> None:
        """Refuse torchtitan's choices of attention: the model runs the ring whatever they say."""
        for name, only in (("attn_type", "sdpa"), ("attn_mask_type", "causal")):
            value = getattr(self, name)
            if value != only:
                raise ValueError(
                    f"model args: {name} = {value!r}: attention is causal and knows documents by "
                    f"[documents] mask, on the kernel of [striped_cp]; allowed: {only!r}"
                )

    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        """Take over what the job says."""
        assert isinstance(job_config, StripedJobConfig)
        self.max_seq_len = job_config.training.seq_len
        self.rope = job_config.rope
        self.memory = job_config.memory
        self.rope_theta = job_config.rope.theta
        self.kernel = job_config.striped_cp.kernel

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


# Meta's published shapes: Llama 3 (arXiv 2407.21783, table 3), Llama 3.2 for 1B and 3B. The debug
# model's vocabulary is that of assets/tokenizer.
FLAVORS = {
    "debugmodel": TransformerModelArgs(
        dim=128, n_layers=4, n_heads=8, n_kv_heads=4, vocab_size=2048, multiple_of=64
    ),
    "1B": TransformerModelArgs(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.5, multiple_of=256
    ),
    "3B": TransformerModelArgs(
        dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim_multiplier=1.0, multiple_of=256
    ),
    "8B": TransformerModelArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=1024
    ),
    "70B": TransformerModelArgs(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4096
    ),
    "405B": TransformerModelArgs(
        dim=16384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim_multiplier=1.2, multiple_of=4096
    ),
}
