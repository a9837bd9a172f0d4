"""Sizes of the model, and what of the job's configuration its modules need."""

from dataclasses import dataclass, field

from torchtitan.models.llama3.model import args as titan

from recipes.config.schema import Memory, Rope, StripedJobConfig
from recipes.models.shapes import SHAPES, ModelShape
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


def _args(shape: ModelShape) -> TransformerModelArgs:
    # torchtitan rounds 8/3 dim up to a multiple of `multiple_of`: one times, for every shape here.
    return TransformerModelArgs(
        dim=shape.dim,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        vocab_size=shape.vocab_size,
        multiple_of=shape.ffn_dim,
    )


FLAVORS = {name: _args(shape) for name, shape in SHAPES.items()}
