"""torchtitan's metrics, counted right for any degree, and those of the ring.

What differs from torchtitan 0.2.2: time per step is divided by the steps that were made, not by
`log_freq` (at step 1 one, not `log_freq`); validation takes no part in training's time and tokens,
and has a throughput of its own; the last step is always logged.
docs/reference/metrics.md explains every tag.
"""

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.metrics import (
    DeviceMemStats,
    LoggerContainer,
    MetricsProcessor,
    TensorBoardLogger,
    _get_metrics_rank,
)

from recipes.config.mixture import mixture_names
from recipes.config.schema import StripedJobConfig
from recipes.metrics.charts import custom_scalars, twins
from recipes.metrics.interval import Interval
from recipes.metrics.positions import LossByPosition
from recipes.metrics.progress import signs_of_life
from recipes.metrics.ring_clock import (
    DeviceRingClock,
    HostRingClock,
    RingClock,
    RingTimes,
    ring_times,
    wait_warning,
)
from recipes.metrics.summary import Summary, Work
from recipes.models.decoder.args import TransformerModelArgs
from recipes.planner.hardware import find_network_gb_s
from recipes.planner.log import plan_line, plan_of_run, plan_scalars, timeout_warning
from recipes.planner.report import exposed_ring_text
from recipes.titan import ParallelDims, device_type, logger
from recipes.titan.patches import own_tensorboard_folder
from striped_cp import Selection, observe


class StripedMetrics(MetricsProcessor):
    """Everything is a collective of all ranks but what only counts."""

    job_config: StripedJobConfig

    def __init__(
        self,
        job_config: StripedJobConfig,
        parallel_dims: ParallelDims,
        model_args: TransformerModelArgs,
    ) -> None:
        logs = Path(job_config.job.dump_folder, job_config.metrics.save_tb_folder)
        with own_tensorboard_folder(logs):
            super().__init__(job_config, parallel_dims)
        self.model_args = model_args
        self.device = torch.device(device_type)
        self.started = False
        self.told_of_wait = False
        self.interval = Interval()
        self.positions = LossByPosition(job_config.training.seq_len, self.device)
        self.ring_clock: RingClock | None = None
        self.planned = self._plan()
        self.step_seconds = self.planned.get("planned/end_to_end(s)")
        self.summary = Summary(parallel_dims.world_size, self.gpu_peak_flops, self.planned)
        self.tensorboard = self._tensorboard()
        self.measures_ring = job_config.metrics.ring and parallel_dims.cp_enabled
        if self.tensorboard is not None:
            names = mixture_names(job_config)
            charts = custom_scalars(job_config.validation.enable, self.measures_ring, names)
            self.tensorboard.add_custom_scalars(charts)

    def should_log(self, step: int) -> bool:
        return super().should_log(step) or step == self.job_config.training.steps

    # What the trainer reports while it works.

    def note_kernel(self, selection: Selection) -> None:
        """Keep which attention kernel was taken, and how the others compare, for the summary."""
        self.summary.kernel = {
            "chosen": selection.kernel,
            "relative_time": selection.relative,
            "refused": selection.refused,
        }
        times = {f"kernel/{name}": ratio for name, ratio in selection.relative.items()}
        if times:
            self.logger.log(times, 0)

    def count_batch(self, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> None:
        """Count a batch as loaded: "boundaries" int64 (B, N) or none, the rest int64 (B, S)."""
        seconds = self.data_loading_times.pop()
        boundaries, tokens = inputs.get("boundaries"), inputs["input"]
        mask = self.job_config.documents.mask
        self.interval.count_batch(self.model_args.shape, boundaries, tokens, labels, seconds, mask)

    @contextlib.contextmanager
    def measure_step(self, step: int) -> Iterator[None]:
        """Around a step, loading and logging included."""
        if not self.started:
            # Not before: building the model is no part of training's time.
            self.started = True
            self.interval = Interval()
        self.interval.steps += 1
        self.ring_clock = None
        if self.measures_ring and self.should_log(step):
            self.ring_clock = HostRingClock() if device_type == "cpu" else DeviceRingClock()
        with observe(self.ring_clock), signs_of_life(step, self.step_seconds):
            yield

    # What is logged.

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log what was done since the last log; `extra_metrics` has "n_tokens_seen"."""
        interval = self.interval
        seconds = time.perf_counter() - interval.began
        data = interval.over(self.parallel_dims.get_optional_mesh("batch"), self.device)
        ring = self._ring_times()
        memory = self.device_memory_monitor.get_peak_stats()
        extra = extra_metrics or {}

        work = self._work(interval, seconds, data.pairs_per_token)
        rank_seconds = seconds * self.parallel_dims.world_size
        tps = work.tokens / rank_seconds
        mfu, mfu_causal = (
            100 * flops / (rank_seconds * self.gpu_peak_flops)
            for flops in (work.flops, work.flops_causal)
        )
        self.step_seconds = seconds / interval.steps
        warning = wait_warning(ring, self.step_seconds)
        if warning is not None and self.device.type != "cpu" and not self.told_of_wait:
            self.told_of_wait = True
            logger.warning(warning)
        seconds_left = self.step_seconds * (self.job_config.training.steps - step)
        metrics = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "throughput(tps)": tps,
            "throughput_total(tps)": work.tokens / seconds,
            "tflops": work.flops / rank_seconds / 1e12,
            "mfu(%)": mfu,
            "mfu_causal(%)": mfu_causal,
            "time_metrics/end_to_end(s)": self.step_seconds,
            "time_metrics/data_loading(s)": interval.loading_seconds / interval.batches,
            "time_metrics/data_loading(%)": 100 * interval.loading_seconds / seconds,
            "time_metrics/left(h)": seconds_left / 3600,
            "n_sequences_seen": extra["n_tokens_seen"] // self.job_config.training.seq_len,
            "data/documents_per_sequence": data.documents_per_sequence,
            "data/longest_document": data.longest_document,
            "data/padding(%)": 100 * data.padding_share,
            **_memory_scalars("memory/", memory),
            "memory/num_alloc_retries": memory.num_alloc_retries,
            "memory/num_ooms": memory.num_ooms,
            **_ring_scalars(ring),
            **self._position_scalars(self.positions, ""),
            **self.planned,
            **extra,
        }
        self.logger.log(metrics, step)
        if self.tensorboard is not None:
            for tag, value in twins(metrics).items():
                self.tensorboard.add_scalar(tag, value, step)
        color = self.color
        logger.info(
            f"{color.red}step: {step:2}  "
            f"{color.green}loss: {global_avg_loss:8.5f}  "
            f"{color.orange}grad_norm: {grad_norm:7.4f}  "
            f"{color.turquoise}memory: {_memory_text(memory)}  "
            f"{color.blue}tps: {round(tps):,}  "
            f"{color.cyan}tflops: {metrics['tflops']:,.2f}  "
            f"{color.magenta}mfu: {mfu:.2f}% (causal {mfu_causal:.2f}%)  "
            f"{color.yellow}{f'imbalance: {ring.imbalance:.2f}  ' if ring else ''}"
            f"{color.cyan}left: {timedelta(seconds=round(seconds_left))}{color.reset}"
        )
        if ring is not None:
            self.summary.imbalances.append(ring.imbalance)
        self.summary.add(work, extra["n_tokens_seen"], global_avg_loss, memory.max_reserved_gib)
        self.interval = Interval()
        self.device_memory_monitor.reset_peak_stats()

    def log_validation(
        self,
        loss: float,
        step: int,
        extra_metrics: dict[str, Any] | None = None,
        *,
        tokens: int,
        seconds: float,
        positions: LossByPosition,
    ) -> None:
        """Log a round of validation.

        Args:
            tokens: of all ranks.
            seconds: how long it took; put off the time that training is charged for.
            positions: losses of the round.
        """
        self.interval.began += seconds
        memory = self.device_memory_monitor.get_peak_stats()
        tps = tokens / seconds / self.parallel_dims.world_size
        metrics = {
            "validation_metrics/loss": loss,
            "validation_metrics/throughput(tps)": tps,
            **_memory_scalars("validation_metrics/memory/", memory),
            **self._position_scalars(positions, "validation_"),
            **(extra_metrics or {}),
        }
        self.logger.log(metrics, step)
        self.summary.validation_loss = loss
        color = self.color
        logger.info(
            f"{color.yellow}validate step: {step:2}  "
            f"{color.green}loss: {loss:7.4f}  "
            f"{color.turquoise}memory: {_memory_text(memory)}  "
            f"{color.blue}tps: {round(tps):,}{color.reset}"
        )
        self.device_memory_monitor.reset_peak_stats()

    def close(self) -> None:
        """Close the logs; the rank that logs sums the run up, if it has made a step."""
        logs = self.tensorboard.log_dir if self.tensorboard is not None else None
        folder = Path(self.job_config.job.dump_folder)
        rank = _get_metrics_rank(self.parallel_dims, self.job_config)
        try:
            super().close()
            if self.summary.first is not None and torch.distributed.get_rank() == rank:
                logger.info(self.summary.write(folder, logs))
        except OSError as error:  # it would hide what ended the run: a full disk does both
            logger.warning(f"{folder}: {error.strerror}: its summary is not written")

    # The parts of the above.

    def _plan(self) -> dict[str, float]:
        """The planner's figures for this run; none where it knows the device or the run not."""
        name = self.device_memory_monitor.device_name
        try:
            plan = plan_of_run(self.job_config, self.parallel_dims.world_size, name)
        except ValueError as error:
            logger.info(f"Plan: none, {error}")
            return {}
        logger.info(plan_line(plan))
        exposed = exposed_ring_text(plan, find_network_gb_s(plan.gpu.network))
        if exposed is not None:
            logger.warning(f"The plan expects that {exposed}")
        warning = timeout_warning(plan, self.job_config.comm.train_timeout_seconds)
        if warning is not None:
            logger.warning(warning)
        return plan_scalars(plan)

    def _tensorboard(self):
        """torchtitan's SummaryWriter, on ranks that have one."""
        if not isinstance(self.logger, LoggerContainer):
            return None
        for backend in self.logger._loggers:
            if isinstance(backend, TensorBoardLogger):
                return backend.writer
        return None

    def _work(self, interval: Interval, seconds: float, pairs_per_token: float) -> Work:
        """This interval's work of all ranks."""
        dims = self.parallel_dims
        tokens = interval.tokens * dims.world_size // dims.non_data_parallel_size
        flops = self.model_args.shape.training_flops_per_token
        full_square = tokens * flops(self.job_config.training.seq_len)
        return Work(interval.steps, tokens, seconds, full_square, tokens * flops(pairs_per_token))

    def _ring_times(self) -> RingTimes | None:
        if self.ring_clock is None:
            return None
        dims = self.parallel_dims
        batch = dims.get_optional_mesh("batch")
        return ring_times(self.ring_clock, dims.get_mesh("cp"), batch, self.device)

    def _position_scalars(self, positions: LossByPosition, prefix: str) -> dict[str, float]:
        buckets = positions.take(self.parallel_dims.get_optional_mesh("loss"))
        losses = {f"{prefix}loss_by_position/{b.name}": b.loss for b in buckets}
        shares = {f"{prefix}token_share_by_position/{b.name}": b.share for b in buckets}
        return losses | shares


def _memory_scalars(prefix: str, memory: DeviceMemStats) -> dict[str, float]:
    return {
        f"{prefix}max_active(GiB)": memory.max_active_gib,
        f"{prefix}max_active(%)": memory.max_active_pct,
        f"{prefix}max_reserved(GiB)": memory.max_reserved_gib,
        f"{prefix}max_reserved(%)": memory.max_reserved_pct,
    }


def _memory_text(memory: DeviceMemStats) -> str:
    return f"{memory.max_reserved_gib:5.2f}GiB({memory.max_reserved_pct:.2f}%)"


def _ring_scalars(ring: RingTimes | None) -> dict[str, float]:
    if ring is None:
        return {}
    return {
        "ring/attention(s)": ring.attention,
        "ring/attention_slowest(s)": ring.slowest,
        "ring/wait(s)": ring.wait,
        "ring/wait_least(s)": ring.least_wait,
        "ring/imbalance": ring.imbalance,
        "ring/sent(MB)": ring.sent_bytes / 1e6,
    }
