"""A model's sizes as torchtitan takes them, and what of the job's settings its modules need."""

from dataclasses import dataclass, field

from torch import nn
from torchtitan.models.llama3.model import args as titan

from recipes.config.schema import Memory, Rope, StripedJobConfig
from recipes.models.family import ModelFamily
from recipes.models.registry import family_of, shape_of
from recipes.models.shapes import ModelShape
from recipes.titan import JobConfig


@dataclass
class TransformerModelArgs(titan.TransformerModelArgs):
    """torchtitan's, with the shape of the model and the `[rope]` and `[memory]` sections."""

    rope_scaling_args: None = None
    rope: Rope = field(default_factory=Rope)
    memory: Memory = field(default_factory=Memory)
    kernel: str = "auto"
    # Set by `args_of`; defaults only because those above have some.
    shape: ModelShape = None  # type: ignore[assignment]
    family: ModelFamily = None  # type: ignore[assignment]

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

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and training FLOPs per token with the full square of attention.

        torchtitan's own (0.2.2) takes dim / heads for the width of a head, and leaves out an output
        projection that is the embedding.
        """
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return parameters, int(self.shape.training_flops_per_token(seq_len))


def args_of(family: ModelFamily, shape: ModelShape) -> TransformerModelArgs:
    # torchtitan rounds 8/3 dim up to a multiple of `multiple_of`: one times, for every shape here.
    return TransformerModelArgs(
        dim=shape.dim,
        n_layers=shape.n_layers,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        vocab_size=shape.vocab_size,
        multiple_of=shape.ffn_dim,
        norm_eps=shape.norm_eps,
        shape=shape,
        family=family,
    )


def model_args(config: StripedJobConfig) -> TransformerModelArgs:
    """The run's model, with what the job says."""
    args = args_of(family_of(config), shape_of(config))
    args.update_from_config(config)
    return args
