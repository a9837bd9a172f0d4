"""One training step of the debug model under any settings: its loss and gradients."""

import re

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from recipes.config.schema import StripedJobConfig
from recipes.data.batch import BatchSharder, plain_loss
from recipes.memory.loss import build_loss
from recipes.models.decoder.args import model_args
from recipes.models.decoder.model import Transformer
from recipes.models.decoder.parallelize import parallelize
from recipes.preflight import load_config

WRAPPER_NAMES = re.compile(r"_checkpoint_wrapped_module\.|_orig_mod\.")
BASE = [
    *["--job.config_file", "train_configs/debug_cpu.toml"],
    *["--training.seq_len", "64", "--training.local_batch_size", "2", "--rope.extrapolate"],
]


def make_config(*overrides: str) -> StripedJobConfig:
    return load_config([*BASE, *overrides])


def make_dims(**degrees: int) -> ParallelDims:
    """torchtitan's meshes of all ranks; degrees that are not named are 1."""
    alone = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp"), 1)
    dims = ParallelDims(**alone | degrees, world_size=dist.get_world_size())
    dims.build_mesh()
    return dims


class Step:
    """A model under the given settings, spread over the ranks of the default group."""

    def __init__(self, *overrides: str):
        self.config = make_config(*overrides)
        settings = self.config.parallelism
        self.dims = make_dims(
            dp_replicate=settings.data_parallel_replicate_degree,
            dp_shard=settings.data_parallel_shard_degree,
            cp=settings.context_parallel_degree,
            tp=settings.tensor_parallel_degree,
            pp=settings.pipeline_parallel_degree,
        )
        self.loss_fn = build_loss(self.config)
        args = model_args(self.config)
        with torch.device("meta"):
            model = Transformer(args)
        self.schedule = None
        if self.dims.pp_enabled:
            device = torch.device("cpu")
            self.schedule, self.parts, self.has_first, self.has_last = pipeline_llm(
                model, self.dims, self.config, device, args, parallelize, self.loss_fn
            )
        else:
            self.parts = [parallelize(model, self.dims, self.config)]
        for part in self.parts:
            part.to_empty(device="cpu")
            torch.manual_seed(0)
            with torch.no_grad():
                part.init_weights()
            part.train()
        tp_loss = self.dims.tp_enabled and not settings.disable_loss_parallel
        self.context = dist_utils.get_train_context(tp_loss)

    def run(self) -> torch.Tensor:
        """Loss of the whole batch, summed over its tokens; gradients stay on the model."""
        sharder = BatchSharder(self.config, self.dims)
        tokens, labels, *_, kwargs = sharder.shard(*make_batch(self.config))
        kwargs["labels"] = labels
        with self.context():
            if self.schedule is None:
                loss = self.loss_fn(self.parts[0](tokens, **kwargs), labels)
                loss.backward()
                loss = plain_loss(loss.detach())
            else:
                losses: list[torch.Tensor] = []
                self.schedule.step(
                    *((tokens,) if self.has_first else ()),
                    **kwargs,
                    target=labels if self.has_last else None,
                    losses=losses if self.has_last else None,
                    return_outputs=False,
                )
                loss = torch.zeros(())
                if self.has_last:
                    loss = plain_loss(torch.stack(losses).sum().detach())
                dist.all_reduce(loss, group=self.dims.get_mesh("pp").get_group())
        loss_mesh = self.dims.get_optional_mesh("loss")
        if loss_mesh is not None:
            dist.all_reduce(loss, group=loss_mesh.get_group())
        return loss

    @torch.no_grad()
    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Start from these whole parameters, by torchtitan's names."""
        for part in self.parts:
            for name, parameter in part.named_parameters():
                value = weights[WRAPPER_NAMES.sub("", name)]
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)

    def gradients(self) -> dict[str, torch.Tensor]:
        return whole_gradients(self.parts)


def whole_gradients(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Whole gradients by torchtitan's parameter names; those of this rank's stages."""
    grads = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            grads[WRAPPER_NAMES.sub("", name)] = whole
    return grads


def make_batch(config: StripedJobConfig) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tokens of a few documents a row, a third of the labels ignored; the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    shape = (config.training.local_batch_size, config.training.seq_len)
    tokens = torch.randint(0, 2000, shape, generator=generator)
    labels = torch.randint(0, 2000, shape, generator=generator)
    labels[torch.rand(shape, generator=generator) < 0.3] = -100
    cuts = torch.tensor([0.0, 0.27, 0.71, 1.0]) * shape[1]
    boundaries = cuts.long().expand(shape[0], -1).contiguous()
    return {"input": tokens, "boundaries": boundaries}, labels


def save_step(path: str, *overrides: str) -> float:
    """Run a step on one rank and keep it in a file, for others to compare theirs with."""
    step = Step(*overrides)
    weights = {name: p.detach().clone() for name, p in step.parts[0].named_parameters()}
    loss = step.run()
    torch.save({"weights": weights, "loss": loss, "gradients": step.gradients()}, path)
    return loss.item()


def compare_step(path: str, *overrides: str) -> dict[str, float]:
    """Largest error of loss and gradients against a file of `save_step`.

    Gradients: norm of the difference over the norm, of the worst parameter.
    """
    expected = torch.load(path)
    step = Step(*overrides)
    step.load(expected["weights"])
    loss = step.run()
    errors = {
        name: ((grad - expected["gradients"][name]).norm() / expected["gradients"][name].norm())
        for name, grad in step.gradients().items()
    }
    assert errors
    return {
        "loss": abs(loss / expected["loss"] - 1).item(),
        "gradients": max(errors.values()).item(),
    }
