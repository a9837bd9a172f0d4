"""Registers the train spec "llama3_striped" with torchtitan."""

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from recipes.data.dataset import build_dataloader
from recipes.data.tokens import build_tokenizer
from recipes.memory.loss import build_loss
from recipes.metrics.processor import StripedMetrics
from recipes.models.llama3.args import FLAVORS
from recipes.models.llama3.model import Transformer
from recipes.models.llama3.parallelize import parallelize_llama
from recipes.models.llama3.state_dict_adapter import StateDictAdapter
from recipes.titan import float8
from recipes.train.validator import build_validator

NAME = "llama3_striped"


def register() -> None:
    """Make the model known to torchtitan's trainer; once per process."""
    float8.register()
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
