"""Real trainers on the ranks of one process group, fed with the same sequences at every layout.

`run_ranks(n, train, Job(...))` trains through `StripedTrainer`, exactly as `train.py` does but for
the data: `ROWS` sequences a step, dealt to the data-parallel ranks in order, so that the losses and
gradients of all layouts are comparable.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.components import metrics as titan_metrics
from torchtitan.protocols import train_spec as titan_train_spec

from recipes.models.registry import MODELS
from recipes.preflight import load_config
from recipes.train import spec as train_spec
from recipes.train.trainer import StripedTrainer
from tests.helpers.model_step import whole_gradients
from tests.helpers.models import TOY, TOY_WINDOWS

CP = "--parallelism.context_parallel_degree"
TP = "--parallelism.tensor_parallel_degree"
PP = "--parallelism.pipeline_parallel_degree"
# Without the code generator: what is compiled is the same, and it takes seconds.
COMPILE = ("--compile.enable", "--compile.components", "model", "--compile.backend", "aot_eager")
ROWS, SEQ_LEN = 4, 64
STEPS = 5
BASE = (
    *("--job.config_file", "train_configs/debug_cpu.toml"),
    *("--training.seq_len", str(SEQ_LEN), "--training.steps", str(STEPS)),
    *("--training.global_batch_size", str(ROWS), "--metrics.log_freq", "1"),
    *("--metrics.no-enable-tensorboard", "--lr_scheduler.warmup_steps", "1"),
    # Gradients are compared before they are clipped.
    *("--training.max_norm", "1e9", "--debug.seed", "3"),
    *("--parallelism.context_parallel_degree", "1"),
    *("--validation.enable", "--validation.freq", "1", "--validation.steps", "1"),
)


@dataclass
class Job:
    """A training job: the folder it works in and its settings.

    Attributes:
        folder: for checkpoints.
        settings: of the command line; they come after `BASE`.
        reference: file of another job's first gradients, to compare with; or where to save them.
        save: whether to save the gradients of step 1 there instead.
    """

    folder: str
    settings: tuple[str, ...] = ()
    reference: str | None = None
    save: bool = False


@dataclass
class Result:
    """What a rank saw.

    Attributes:
        scalars: what TensorBoard would show, `scalars[tag][step]`; empty on the ranks that do not
            log.
        gradient_errors: per parameter of this rank, |g - reference| / |reference| of step 1.
        changed: whether any parameter differs from its value before the training.
        recompiled: graphs that torch.compile made after step 2.
    """

    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    changed: bool = False
    recompiled: int = 0

    def values(self, tag: str) -> list[float]:
        return [value for _, value in sorted(self.scalars[tag].items())]

    @property
    def losses(self) -> list[float]:
        return self.values("loss_metrics/global_avg_loss")


def trainer_of(arguments: list[str]) -> StripedTrainer:
    """The trainer that the command line makes on this rank."""
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    if "llama3_striped" not in titan_train_spec._extra_train_specs:
        MODELS["toy_striped"] = TOY
        MODELS["toy_windows_striped"] = TOY_WINDOWS
        train_spec.register()
    return StripedTrainer(load_config(arguments, dist.get_world_size()))


def make_trainer(job: Job) -> StripedTrainer:
    trainer = trainer_of([*BASE, "--job.dump_folder", job.folder, *job.settings])
    mesh = trainer.parallel_dims.get_optional_mesh("batch")
    degree, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
    rows = torch.arange(ROWS).view(degree, -1)[rank]
    parts = rows.split(trainer.job_config.training.local_batch_size)
    trainer.job_config.validation.steps = len(parts)
    trainer.dataloader = Batches(parts, lambda: trainer.step)
    if trainer.job_config.validation.enable:
        trainer.validator.dataloader = Batches(parts, lambda: 1)
    return trainer


class Batches:
    """The rows of a step that belong to one data-parallel rank, one local batch after the other.

    `step` tells which step's; the validation data are always those of step 1.
    """

    epoch = 0

    def __init__(self, parts: tuple[torch.Tensor, ...], step: Callable[[], int]) -> None:
        self.parts, self.step = parts, step

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            for rows in self.parts:
                inputs, labels = make_batch(self.step())
                yield {name: value[rows] for name, value in inputs.items()}, labels[rows]


def make_batch(step: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tokens in documents, up to one more than the step, a third of the labels ignored.

    Step 4 has one document in every row.
    """
    generator = torch.Generator().manual_seed(step)
    shape = (ROWS, SEQ_LEN)
    tokens = torch.randint(0, 2000, shape, generator=generator)
    # A pattern to learn, so that losses of different steps are worth comparing.
    labels = (7 * tokens + 3) % 2000
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    cuts = torch.randint(0, SEQ_LEN + 1, (ROWS, step), generator=generator).sort(dim=1).values
    cuts = torch.full_like(cuts, SEQ_LEN) if step == 4 else cuts
    ends = torch.tensor([[0, SEQ_LEN]]).expand(ROWS, -1)
    boundaries = torch.cat([ends[:, :1], cuts, ends[:, 1:]], dim=1)
    return {"input": tokens, "boundaries": boundaries}, labels


def train(job: Job) -> Result:
    """Train to the end; the same steps as `train.py`."""
    trainer = make_trainer(job)
    result = Result()
    _record_scalars(trainer, result)
    before = [weight.clone() for weight in _weights(trainer)]
    hook = trainer.optimizers.register_step_pre_hook
    hook(lambda *_: _first_step(trainer, job, result) if trainer.step == 1 else None)
    graphs = _count_graphs_after_step_2(trainer)
    with mock.patch("time.sleep"):
        trainer.train()
    trainer.close()
    after = _weights(trainer)
    result.changed = any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    result.recompiled = graphs()
    return result


def _weights(trainer: StripedTrainer) -> list[torch.Tensor]:
    """This rank's parts of the weights; FSDP puts them back in place for a state_dict."""
    tensors = [t for part in trainer.model_parts for t in part.state_dict().values()]
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _record_scalars(trainer: StripedTrainer, result: Result) -> None:
    shown = titan_metrics._get_metrics_rank(trainer.parallel_dims, trainer.job_config)

    def record(metrics: dict[str, Any], step: int) -> None:
        if dist.get_rank() == shown:
            for tag, value in metrics.items():
                result.scalars.setdefault(tag, {})[step] = value

    trainer.metrics_processor.logger.log = record


def _first_step(trainer: StripedTrainer, job: Job, result: Result) -> None:
    gradients = {
        name: grad.float().clone() for name, grad in whole_gradients(trainer.model_parts).items()
    }
    if job.save:
        torch.save(gradients, job.reference)
    elif job.reference is not None:
        expected = torch.load(job.reference)
        result.gradient_errors = {
            name: ((grad - expected[name]).norm() / expected[name].norm()).item()
            for name, grad in gradients.items()
        }


def _count_graphs_after_step_2(trainer: StripedTrainer) -> Callable[[], int]:
    counts = []

    def count() -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    hook = trainer.optimizers.register_step_post_hook
    hook(lambda *_: counts.append(count()) if trainer.step == 2 else None)
    return lambda: count() - counts[0] if counts else 0


def train_from_seed(folder: str, settings: tuple[str, ...] = ()) -> Result:
    """One rank: save initial weights, train from them, and keep the gradients of step 1.

    `common(folder)` makes other jobs start from the same weights.
    """
    seeding = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    make_trainer(Job(folder, (*seeding, *settings))).checkpointer.save(curr_step=0, last_step=True)
    job = Job(f"{folder}/reference", (*common(folder), *settings), gradients(folder), save=True)
    return train(job)


def gradients(folder: str) -> str:
    """File with the gradients of `train_from_seed`."""
    return f"{folder}/gradients.pt"


def common(folder: str) -> tuple[str, ...]:
    return (
        *("--checkpoint.enable", "--checkpoint.initial_load_path", f"{folder}/checkpoint/step-0"),
        *("--checkpoint.load_only", "--checkpoint.initial_load_model_only"),
    )
