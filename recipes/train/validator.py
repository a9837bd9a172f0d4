"""Validation loss that does not depend on how the ranks share the work.

torchtitan 0.2.2 counts tokens after sharding and adds them up over data-parallel ranks only, which
multiplies the loss by the context-parallel degree; it also goes on in the data where the last round
stopped, so that no two rounds measure the same.
"""

import time
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
from torch import nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator, ValidationContext

from recipes.config.schema import StripedJobConfig
from recipes.data.batch import BatchSharder, Microbatch, plain_loss
from recipes.data.dataset import build_validation_dataloader
from recipes.memory.loss import collect_token_losses
from recipes.metrics.positions import LossByPosition
from recipes.metrics.processor import StripedMetrics
from recipes.titan import (
    IGNORE_INDEX,
    BaseDataLoader,
    LossFunction,
    ParallelDims,
    device_module,
    device_type,
    dist_utils,
)
from recipes.train.pipeline import loss_of_last_stage, pipeline_loss


class StripedValidator(BaseValidator):
    """Mean loss per token over the first `validation.steps` batches, the same ones every time."""

    job_config: StripedJobConfig

    def __init__(
        self,
        job_config: StripedJobConfig,
        dataloader: BaseDataLoader,
        parallel_dims: ParallelDims,
        loss_fn: LossFunction,
        validation_context: ValidationContext,
        maybe_enable_amp: AbstractContextManager[None],
        metrics_processor: StripedMetrics,
        pp_schedule: Any | None = None,
        pp_has_first_stage: bool | None = None,
        pp_has_last_stage: bool | None = None,
    ) -> None:
        super().__init__(job_config)
        self.dataloader = dataloader
        self.parallel_dims = parallel_dims
        self.sharder = BatchSharder(job_config, parallel_dims)
        self.loss_fn = loss_fn
        self.validation_context = validation_context
        self.maybe_enable_amp = maybe_enable_amp
        self.metrics_processor = metrics_processor
        self.positions = LossByPosition(job_config.validation.seq_len, device_type)
        self.pp_schedule = pp_schedule
        self.pp_has_first_stage = pp_has_first_stage
        self.pp_has_last_stage = pp_has_last_stage

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        for part in model_parts:
            part.eval()
        device_module.synchronize()  # the last training step may still be under way
        began = time.perf_counter()
        tokens_read = 0
        loss_sum = torch.zeros((), device=device_type)
        tokens = torch.zeros((), dtype=torch.int64, device=device_type)
        # From the start of the data every time; all ranks have equally many batches.
        steps = self.job_config.validation.steps
        for input_dict, labels in islice(self.dataloader, steps if steps != -1 else None):
            tokens_read += labels.numel()
            microbatch = self.sharder.shard(input_dict, labels).to(device_type)
            tokens += (microbatch.labels != IGNORE_INDEX).sum()
            with collect_token_losses() as losses:
                loss_sum += self._loss(model_parts, microbatch)
            self.positions.add(losses, microbatch.context, microbatch.labels)
        mesh = self.parallel_dims.get_optional_mesh("loss")
        total = dist_utils.dist_sum(tokens, mesh)
        loss_sum = loss_of_last_stage(loss_sum, self.parallel_dims)
        loss = dist_utils.dist_sum(loss_sum, mesh) / max(total, 1.0)
        dims = self.parallel_dims
        self.metrics_processor.log_validation(
            loss,
            step,
            tokens=tokens_read * dims.world_size // dims.non_data_parallel_size,
            seconds=time.perf_counter() - began,
            positions=self.positions,
        )
        for part in model_parts:
            part.train()

    def _loss(self, model_parts: list[nn.Module], microbatch: Microbatch) -> torch.Tensor:
        """Loss sum of this rank's tokens; 0 on the pipeline stages that do not know it."""
        with self.validation_context():
            if self.pp_schedule is not None:
                return pipeline_loss(
                    self.pp_schedule.eval,
                    microbatch,
                    has_first=bool(self.pp_has_first_stage),
                    has_last=bool(self.pp_has_last_stage),
                )
            (model,) = model_parts
            tokens, labels, _, kwargs = microbatch
            with self.maybe_enable_amp:
                return plain_loss(self.loss_fn(model(tokens, **kwargs, labels=labels), labels))


def build_validator(
    job_config: StripedJobConfig,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    **kwargs: Any,
) -> StripedValidator:
    """Validator as torchtitan's trainer asks for it."""
    dataloader = build_validation_dataloader(
        dp_world_size=dp_world_size, dp_rank=dp_rank, tokenizer=tokenizer, job_config=job_config
    )
    return StripedValidator(job_config, dataloader, **kwargs)
