"""torchtitan's Trainer for batches that are spread over the context-parallel ranks.

What differs from torchtitan 0.2.2, beside the sharding: tokens are counted where they are (after
sharding, summed over the data- and context-parallel ranks), so that every metric has its true value
for any degree; gradients of a pipeline are divided by the token count like all others; a step
without any label changes nothing.
"""

import math
import os
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchtitan.train import Trainer

from recipes.checkpoint.files import finished_steps
from recipes.checkpoint.manager import StripedCheckpoints
from recipes.checkpoint.resume import hold_to_settings
from recipes.config.schema import StripedJobConfig
from recipes.data.batch import BatchSharder, Microbatch, plain_loss
from recipes.data.tokens import tokenizer_identity
from recipes.evaluation.evaluator import Evaluator
from recipes.evaluation.periodic import PeriodicEvaluation
from recipes.memory.loss import collect_token_losses
from recipes.metrics.processor import StripedMetrics
from recipes.metrics.reduce import max_over, sum_over
from recipes.parallel.agreement import check_agreement, settings_and_code
from recipes.parallel.ring import give_ring_its_groups
from recipes.parallel.startup_check import run_startup_check
from recipes.process import faults, signals
from recipes.titan import IGNORE_INDEX, ParallelDims, cpu_host, dist_utils, logger
from recipes.titan.patches import checkpointer, own_store
from recipes.train.kernel import select_run_kernel
from recipes.train.pipeline import loss_of_last_stage, pipeline_loss
from recipes.weights.export import finish_export


class StripedTrainer(Trainer):
    job_config: StripedJobConfig
    checkpointer: StripedCheckpoints
    metrics_processor: StripedMetrics

    def __init__(self, job_config: StripedJobConfig) -> None:
        with checkpointer(StripedCheckpoints):
            super().__init__(job_config)
        if self.kernel is not None:
            self.metrics_processor.note_kernel(self.kernel)
        data = {"the tokenizer": tokenizer_identity(self.tokenizer)}
        data["the chat template"] = self.tokenizer.chat_identity
        data["the training data"] = self.dataloader.identity
        if job_config.validation.enable:
            data["the validation data"] = self.validator.dataloader.identity
        check_agreement(data)
        self.sharder = BatchSharder(job_config, self.parallel_dims)
        self.evaluation: PeriodicEvaluation | None = None
        if job_config.evaluation.enable:
            (model,) = self.model_parts
            evaluator = Evaluator(job_config, self.tokenizer, self.parallel_dims, model)
            self.evaluation = PeriodicEvaluation(evaluator)
        self.first_step: int | None = None
        self.steps_before: int | None = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.job_config.training.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps_before = state_dict["steps"]

    def init_distributed(self) -> ParallelDims:
        training = self.job_config.training
        offload = training.enable_cpu_offload
        # Without an accelerator gloo serves the offloaded parameters already; torchtitan 0.2.2
        # would name it a second time: "Duplicate device type cpu".
        training.enable_cpu_offload = offload and not cpu_host.is_cpu_host()
        with own_store():
            parallel_dims = super().init_distributed()
        training.enable_cpu_offload = offload
        faults.introduce(torch.distributed.get_rank())
        check_agreement(settings_and_code(self.job_config))
        timeout = timedelta(seconds=self.job_config.comm.init_timeout_seconds)
        give_ring_its_groups(parallel_dims, self.job_config.striped_cp.ulysses_degree, timeout)
        logger.info(_versions(parallel_dims))
        if self.job_config.rope.on_mismatch == "take":
            logger.info(f"[rope] is that of the weights: {self.job_config.rope}")
        run_startup_check(self.job_config, parallel_dims, self.device)
        self.kernel = select_run_kernel(self.job_config, parallel_dims)
        return parallel_dims

    def should_continue_training(self) -> bool:
        """Between two steps: whether there is a next one; leaves the process if asked to."""
        if self.first_step is None:
            self._begin()
        more = super().should_continue_training()
        if more and signals.agreed(self.device):
            self.checkpointer.save_and_leave(self.step, self.step > self.first_step)
        return more

    def _begin(self) -> None:
        """Between loading and the first step, where torchtitan has no place for it."""
        self.first_step = self.step
        steps = self.job_config.training.steps
        hold_to_settings(self.optimizers, self.lr_schedulers, steps, self.steps_before or steps)
        if self.step >= self.job_config.training.steps:
            logger.warning(
                f"nothing to train: step {self.step} is done, training.steps = "
                f"{self.job_config.training.steps}"
            )

    def train(self) -> None:
        super().train()
        checkpoint = self.job_config.checkpoint
        if checkpoint.enable and checkpoint.last_save_in_hf:
            folder = Path(self.checkpointer.folder, f"step-{self.step}")
            finish_export(folder, self.job_config)

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches; `ntokens_seen` becomes the count of all ranks, right on any resume."""
        replicas = self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard
        for input_dict, labels in super().batch_generator(data_iterable):
            self.ntokens_seen += labels.numel() * (replicas - 1)
            self.metrics_processor.count_batch(input_dict, labels)
            yield input_dict, labels

    def train_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        with self.metrics_processor.measure_step(self.step):
            self._train_step(data_iterator)
        if self.evaluation is not None and self.evaluation.due(self.step):
            self._evaluate(self.evaluation)

    def _evaluate(self, evaluation: PeriodicEvaluation) -> None:
        """Measure the model; training is charged neither the time nor the memory of it."""
        start = time.perf_counter()
        evaluation.run(self.step)
        self.metrics_processor.interval.began += time.perf_counter() - start
        self.metrics_processor.device_memory_monitor.reset_peak_stats()

    def _train_step(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> None:
        self.optimizers.zero_grad()
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        microbatches, local_tokens = self._next_microbatches(data_iterator)
        global_tokens = dist_utils.dist_sum(local_tokens, self._loss_mesh())
        # Without labels the loss is 0 / 1 rather than 0 / 0.
        losses = []
        for i, microbatch in enumerate(microbatches):
            self._reduce_replicas(last=i == len(microbatches) - 1)
            with collect_token_losses() as token_losses:
                losses.append(self._forward_backward(microbatch, max(global_tokens, 1.0)))
            self.metrics_processor.positions.add(
                token_losses, microbatch.context, microbatch.labels
            )
        if self.parallel_dims.pp_enabled:
            self._divide_gradients(max(global_tokens, 1.0))
        grad_norm = dist_utils.clip_grad_norm_(
            [p for m in self.model_parts for p in m.parameters()],
            self.job_config.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
        )
        self.checkpointer.maybe_wait_for_staging()
        if global_tokens:
            self.optimizers.step()
        else:
            # Adam would move the weights even so, by its momentum and weight decay.
            logger.warning(f"step {self.step}: no label to learn from, the weights stay")
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            self._log(torch.stack(losses).sum(), local_tokens, global_tokens, grad_norm, lr)
        saves = self.checkpointer._should_save(
            self.step, self.step == self.job_config.training.steps
        )
        if saves or self.metrics_processor.should_log(self.step):
            self._check_finite(grad_norm.item())

    def _check_finite(self, grad_norm: float) -> None:
        """Stop a run whose gradients are no numbers, before anything of it is saved.

        The norm is that of all parameters on every rank, so all ranks stop. A loss that is no
        number makes the norm one too, and weights that are none spoil every later step: it is
        enough to look where a step is logged or saved, and a checkpoint with finite gradients has
        finite weights.

        Raises:
            Stop: with the step and the last checkpoint.
        """
        if math.isfinite(grad_norm):
            return
        good = None
        if self.checkpointer.enable:
            folder = Path(self.checkpointer.folder)
            good = max(finished_steps(folder), default=None)
        checkpoint = "none" if good is None else folder / f"step-{good}"
        raise faults.Stop(
            f"step {self.step}: loss or gradients are not finite (gradient norm {grad_norm}); "
            f"last good checkpoint: {checkpoint}, the same command goes on from it; look at loss "
            "and grad_norm of the steps before, at the documents of these steps, and at "
            "optimizer.lr, lr_scheduler.warmup_steps and training.mixed_precision_param"
        )

    def _next_microbatches(
        self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> tuple[list[Microbatch], torch.Tensor]:
        """This rank's part of the batches of a step, on the device, and the labels in it."""
        microbatches = []
        count = torch.zeros((), dtype=torch.int64)
        for _ in range(self.gradient_accumulation_steps):
            microbatch = self.sharder.shard(*next(data_iterator))
            count += (microbatch.labels != IGNORE_INDEX).sum()
            microbatches.append(microbatch.to(self.device))
        return microbatches, count.to(self.device)

    def _forward_backward(self, microbatch: Microbatch, global_tokens: float) -> torch.Tensor:
        """Gradients of one microbatch; returns its loss, summed here, divided by all tokens."""
        if self.parallel_dims.pp_enabled:
            with self.train_context():
                loss_sum = pipeline_loss(
                    self.pp_schedule.step,
                    microbatch,
                    has_first=self.pp_has_first_stage,
                    has_last=self.pp_has_last_stage,
                )
            return loss_sum / global_tokens
        (model,) = self.model_parts
        with self.train_context():
            with self.maybe_enable_amp:
                prediction = model(microbatch.tokens, **microbatch.kwargs, labels=microbatch.labels)
                loss = self.loss_fn(prediction, microbatch.labels) / global_tokens
            del prediction  # its memory is free for the backward pass
            loss.backward()
        return plain_loss(loss.detach())

    def _reduce_replicas(self, *, last: bool) -> None:
        """DDP adds the replicas' gradients up after the last microbatch only.

        It adds up what has accumulated: after every microbatch, the sums would be added up again.
        """
        if self.parallel_dims.dp_replicate_enabled and not self.parallel_dims.fsdp_enabled:
            (model,) = self.model_parts
            model.set_requires_gradient_sync(last)

    def _divide_gradients(self, global_tokens: float) -> None:
        """The schedule runs backward from loss sums; torchtitan 0.2.2 leaves it at that."""
        for part in self.model_parts:
            for parameter in part.parameters():
                if parameter.grad is not None:
                    parameter.grad /= global_tokens

    def _log(
        self,
        loss: torch.Tensor,
        local_tokens: torch.Tensor,
        global_tokens: float,
        grad_norm: torch.Tensor,
        lr: float,
    ) -> None:
        """Average loss over all tokens, and the largest average among the ranks that have any."""
        mesh = self._loss_mesh()
        loss = loss_of_last_stage(loss, self.parallel_dims)
        local_average = loss * max(global_tokens, 1.0) / local_tokens.clamp(min=1)
        self.metrics_processor.log(
            self.step,
            dist_utils.dist_sum(loss, mesh),
            dist_utils.dist_max(local_average, mesh),
            grad_norm.item(),
            extra_metrics={
                "n_tokens_seen": self.ntokens_seen,
                "lr": lr,
                "data/epoch": self.dataloader.epoch,
                **self._given(),
            },
        )

    def _given(self) -> dict[str, float]:
        """Tokens and epoch of every source of a mixture; a collective of all ranks."""
        if not self.job_config.training.mixture:
            return {}
        given = self.dataloader.given
        mesh = self.parallel_dims.get_optional_mesh("batch")
        tokens, epochs = torch.tensor(list(given.values()), device=self.device).unbind(dim=1)
        tokens, epochs = sum_over(tokens, mesh), max_over(epochs, mesh)
        scalars = {f"data/{name}/tokens": n for name, n in zip(given, tokens.tolist(), strict=True)}
        scalars |= {f"data/{name}/epoch": n for name, n in zip(given, epochs.tolist(), strict=True)}
        return scalars

    def _loss_mesh(self) -> torch.distributed.device_mesh.DeviceMesh | None:
        """The ranks that hold different tokens: data parallel times context parallel."""
        return self.parallel_dims.get_optional_mesh("loss")


def _versions(parallel_dims: ParallelDims) -> str:
    """One line: versions and mesh."""
    nccl = "no NCCL"
    if torch.distributed.is_nccl_available() and torch.cuda.is_available():
        nccl = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    degrees = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    mesh = ", ".join(f"{name} {getattr(parallel_dims, name)}" for name in degrees)
    nodes = parallel_dims.world_size // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return (
        f"torch {torch.__version__}, {nccl}, backend {torch.distributed.get_backend()}; "
        f"{parallel_dims.world_size} ranks on {nodes} nodes, mesh {mesh}"
    )
