"""Registers the train spec "llama3_striped" with torchtitan."""

from pathlib import Path

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from recipes.config import StripedJobConfig
from recipes.data import build_dataloader
from recipes.llama3.args import FLAVORS, TransformerModelArgs
from recipes.llama3.model import Transformer
from recipes.llama3.parallelize import parallelize_llama
from recipes.loss import build_loss
from recipes.metrics.processor import StripedMetrics
from recipes.validator import build_validator

NAME = "llama3_striped"


class StateDictAdapter(Llama3StateDictAdapter):
    """torchtitan's names and layouts to and from Hugging Face's.

    torchtitan 0.2.2 warns of a missing index of weights also where none are to be loaded.
    """

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None) -> None:
        folder = Path(hf_assets_path or "")
        has_index = (folder / "model.safetensors.index.json").is_file()
        super().__init__(model_args, hf_assets_path if has_index else None)
        self.hf_assets_path = hf_assets_path


def build_tokenizer(job_config: StripedJobConfig) -> BaseTokenizer:
    """The tokenizer of model.hf_assets_path.

    Raises:
        ValueError: it has entries that the model's embedding does not know.
    """
    tokenizer = build_hf_tokenizer(job_config)
    size, flavor = tokenizer.get_vocab_size(), job_config.model.flavor
    if size > FLAVORS[flavor].vocab_size:
        raise ValueError(
            f"model.hf_assets_path = {job_config.model.hf_assets_path!r}: its tokenizer has {size} "
            f"entries, flavor {flavor!r} has room for {FLAVORS[flavor].vocab_size}"
        )
    return tokenizer


def register() -> None:
    """Make the model known to torchtitan's trainer; once per process."""
    register_train_spec(
        NAME,
        TrainSpec(
            model_cls=Transformer,
            model_args=FLAVORS,
            parallelize_fn=parallelize_llama,
            pipelining_fn=pipeline_llm,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=build_dataloader,
            build_tokenizer_fn=build_tokenizer,
            build_loss_fn=build_loss,
            build_validator_fn=build_validator,
            build_metrics_processor_fn=StripedMetrics,
            state_dict_adapter=StateDictAdapter,
        ),
    )
