"""The TOML schema: torchtitan 0.2.2's `JobConfig` with five sections more.

They are `striped_cp`, `documents`, `rope`, `memory`, and `evaluation`; `recipes.config.load` reads
a file into it.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import tyro

from recipes.config.ranges import (
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    MINUS_ONE_OR_MORE,
    NOT_EMPTY,
    POSITIVE,
    WEIGHT,
)
from recipes.titan import job_config as titan


@dataclass
class Model(titan.Model):
    name: str = "llama3_striped"
    """Family of the model: "llama3_striped", "qwen2_striped" or "qwen3_striped", each a folder of
    recipes/models"""

    flavor: str = "debugmodel"
    """Size of the model, as "8B"; those of a family stand in its folder"""

    hf_assets_path: Annotated[str, NOT_EMPTY] = "assets/tokenizer"
    """Folder with the tokenizer, and with Hugging Face weights where those are loaded"""


@dataclass
class DataSource:
    """Where the documents of a section come from."""

    dataset: str = "sample"
    """Dataset to use: "sample" (the bundled corpus), "local" with dataset_path, a Hugging Face name
    owner/name, or one of torchtitan's own"""

    dataset_path: Annotated[str | list[str] | None, NOT_EMPTY] = None
    """Files, folders or globs of .txt, .jsonl, .json (JSON Lines), these packed as .gz or .zst,
    .parquet, .arrow, .mds, .npy and .bin, one or a list; or a prepared folder (dataset "local");
    where torchtitan's own datasets are found"""

    text_column: Annotated[str, NOT_EMPTY] = "text"
    """JSON key or column that holds the documents: text, lists of token ids (labels, loss_mask and
    attention_mask beside them are used), or conversations: messages, or prompt with completion"""

    dataset_subset: str | None = None
    """Subset (configuration) of a Hugging Face dataset"""

    dataset_split: str = "train"
    """Split of a Hugging Face dataset"""


@dataclass
class MixtureSource(DataSource):
    """One source of a mixture."""

    name: str = ""
    """Of its metrics and in messages. Empty: the last part of its path, or the dataset's name"""

    weight: Annotated[float, WEIGHT] = 1.0
    """Its share of the tokens, relative to the weights of the other sources"""

    min_tokens: Annotated[int | None, AT_LEAST_ONE] = None
    """Documents that are shorter are left out; BOS and EOS count"""

    max_tokens: Annotated[int | None, AT_LEAST_ONE] = None
    """Documents that are longer are left out"""

    seq_len: Annotated[int | None, AT_LEAST_ONE] = None
    """Documents are cut to so many tokens: short sequences within long ones. Unset: they stay as
    long as training.seq_len allows"""

    when_used_up: Literal["repeat", "stop"] = "repeat"
    """Whether a source begins anew at its end, or leaves its share to the others"""


@dataclass
class Training(DataSource, titan.Training):
    """Training on the documents of a source, or of a mixture of several."""

    # In the file only: the parser's options are one for a key.
    mixture: Annotated[list[MixtureSource], tyro.conf.Suppress] = field(default_factory=list)
    """Sources with weights, instead of training.dataset and what goes with it"""

    mixture_packing: Literal["within", "across"] = "within"
    """Whether a packed sequence has documents of one source of the mixture, or of any"""


@dataclass
class Parallelism(titan.Parallelism):
    context_parallel_load_balancer: Literal["striped", "headtail", "contiguous"] = "striped"
    """Which rank of the ring holds which token. "contiguous" is the unbalanced ring"""

    context_parallel_rotate_method: Literal["", "allgather", "alltoall"] = ""
    """Not used: torch's own ring reads it, this project's is striped_cp.rotate_method"""

    def __post_init__(self) -> None:
        """Nothing: torchtitan's check of the load balancer knows only its own ones."""


@dataclass
class Validation(DataSource, titan.Validation):
    local_batch_size: Annotated[int, MINUS_ONE_OR_MORE] = -1
    """Batch size for validation. -1: training.local_batch_size"""

    seq_len: Annotated[int, MINUS_ONE_OR_MORE] = -1
    """Sequence length for validation. -1: training.seq_len"""

    def __post_init__(self) -> None:
        """Nothing: torchtitan's range check is an assertion, this project's has a message."""


@dataclass
class StripedCP:
    block_size: Annotated[int, AT_LEAST_ONE] = 1
    """Tokens per stripe; 1 is balanced for any packing of documents"""

    ulysses_degree: Annotated[int, AT_LEAST_ONE] = 1
    """Neighbouring ranks of context_parallel_degree that trade sequence for heads, inside the node;
    the ring is between them. 1: the ring alone"""

    rotate_method: Literal["ring", "allgather"] = "ring"
    """How keys and values reach the ranks: hop by hop in O(S/P) memory, or at once in O(S)"""

    kernel: Literal["auto", "flash", "fa3", "fa4", "cudnn", "flex", "cpu", "reference"] = "auto"
    """Attention kernel of a tile of the ring; "auto": the fastest of those that prove right on the
    GPUs of the run, timed before the first step"""


@dataclass
class Documents:
    mask: bool = True
    """Whether tokens of a packed sequence attend within their own document only"""

    packing: Literal["pack", "concat"] = "pack"
    """Whole documents, best fit, long ones cut ("pack"), or joined and cut as in torchtitan"""

    reset_positions: bool = True
    """Whether RoPE positions begin at 0 in every document (with mask = false, in every sequence)"""

    loss_on: Literal["all", "assistant", "last"] = "all"
    """Messages of a conversation that are learned: all, those of the assistant, or its last one"""

    too_long: Literal["cut", "leave_out"] = "cut"
    """What becomes of documents and conversations longer than a sequence"""

    shuffle_seed: Annotated[int | None, AT_LEAST_ZERO] = None
    """Prepared documents get a new order every epoch from this seed. Unset: they keep theirs"""


@dataclass
class Rope:
    theta: Annotated[float, POSITIVE] = 500000.0
    """Base of the rotary frequencies"""

    scaling: Literal["none", "llama3", "yarn"] = "llama3"
    """Frequency scaling: "none" for LLaMA-3 weights, "llama3" for 3.1 and later"""

    scaling_factor: Annotated[float, AT_LEAST_ONE] = 8.0
    """How many times the original length the scaled frequencies cover"""

    low_freq_factor: Annotated[float, POSITIVE] = 1.0
    """Wavelengths above original_max_position_embeddings / low_freq_factor are scaled in full"""

    high_freq_factor: Annotated[float, POSITIVE] = 4.0
    """Wavelengths below original_max_position_embeddings / high_freq_factor are left alone"""

    original_max_position_embeddings: Annotated[int, AT_LEAST_ONE] = 8192
    """Sequence length of the pre-training that the frequencies were made for, in tokens"""

    attention_temperature: bool = True
    """Whether "yarn" also scales the attention logits (arXiv 2309.00071, section 3.3)"""

    extrapolate: bool = False
    """Whether sequences longer than these settings are meant for are wanted"""

    on_mismatch: Literal["refuse", "take", "change"] = "refuse"
    """Where config.json of the Hugging Face weights says otherwise: refuse to run, take its
    settings, or change the weights to these by training"""


@dataclass
class Memory:
    loss_chunk_tokens: Annotated[int, AT_LEAST_ZERO] = 2048
    """Tokens whose logits exist at a time. 0: those of the whole local sequence"""

    mlp_chunk_tokens: Annotated[int, AT_LEAST_ZERO] = 0
    """Tokens that pass through the MLP at a time. 0: the whole local sequence"""

    recompute_attention: bool = False
    """Whether activation checkpointing runs the ring again in the backward pass"""

    offload_checkpoints: bool = False
    """Whether the checkpointed inputs of the blocks wait in host memory"""


@dataclass
class Metrics(titan.Metrics):
    ring: bool = True
    """Whether logged steps measure the ring: attention, waiting, imbalance, bytes"""


@dataclass
class Evaluation(DataSource):
    """Measures of long context; needles are hidden in the text of the source."""

    enable: bool = False
    """Whether training measures the model as scripts/evaluate.py does"""

    freq: Annotated[int, AT_LEAST_ONE] = 500
    """Steps of training from one evaluation to the next; the last step has one too"""

    tasks: list[str] = field(
        default_factory=lambda: ["passkey", "needle", "multikey", "multivalue", "copy"]
    )
    """Tasks with a question at the end of the text"""

    lengths: list[int] = field(default_factory=list)
    """Lengths of the tasks' texts in tokens. Empty: a quarter, half and all of training.seq_len"""

    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    """Where needles hide: 0 the beginning of the text, 1 its end"""

    samples: Annotated[int, AT_LEAST_ONE] = 2
    """Samples for every length and depth"""

    texts: Annotated[int, AT_LEAST_ZERO] = 4
    """Texts of the greatest length for loss by position, gain and LongPPL"""

    short_context: Annotated[int, AT_LEAST_ONE] = 8192
    """Tokens of context that the gain of a long one is measured against"""

    seed: Annotated[int, AT_LEAST_ZERO] = 0
    """Decides keys, values and places of the needles"""


@dataclass
class StripedJobConfig(titan.JobConfig):
    """torchtitan's sections and those of this project."""

    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    striped_cp: StripedCP = field(default_factory=StripedCP)
    documents: Documents = field(default_factory=Documents)
    rope: Rope = field(default_factory=Rope)
    memory: Memory = field(default_factory=Memory)
    evaluation: Evaluation = field(default_factory=Evaluation)


def compiles_model(config: titan.JobConfig) -> bool:
    """Whether torch.compile compiles the blocks of the model."""
    return config.compile.enable and "model" in config.compile.components
