"""Registers a train spec with torchtitan for every model of the registry."""

from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import build_optimizers
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from recipes.data.dataset import build_dataloader
from recipes.data.tokens import build_tokenizer
from recipes.memory.loss import build_loss
from recipes.metrics.processor import StripedMetrics
from recipes.models.decoder.args import args_of
from recipes.models.decoder.model import Transformer
from recipes.models.decoder.parallelize import parallelize
from recipes.models.decoder.weights import StateDictAdapter
from recipes.models.registry import MODELS
from recipes.titan import float8
from recipes.train.validator import build_validator


def register() -> None:
    """Make the models known to torchtitan's trainer; once per process."""
    float8.register()
    for name, family in MODELS.items():
        register_train_spec(
            name,
            TrainSpec(
                model_cls=Transformer,
                model_args={flavor: args_of(family, x) for flavor, x in family.flavors.items()},
                parallelize_fn=parallelize,
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
