"""How the model is spread over the ranks: torchtitan's parallelisms around this project's ring."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.tensor_parallel import maybe_enable_async_tp
from torchtitan.models.llama3.infra import parallelize as titan

from recipes.config.schema import StripedJobConfig, compiles_model
from recipes.memory.activation_checkpoint import apply_activation_checkpointing
from recipes.memory.loss import LossHead
from recipes.models.decoder.model import Transformer
from recipes.models.decoder.tensor_parallel import apply_tensor_parallel
from recipes.parallel.ring import layout_of
from recipes.titan import ParallelDims, cpu_host, logger
from striped_cp import RingAttention, StripedContextParallel


def parallelize(
    model: Transformer, parallel_dims: ParallelDims, job_config: StripedJobConfig
) -> nn.Module:
    """Apply tensor and context parallelism, checkpointing, compile, and data parallelism.

    torchtitan's `parallelize_llama` (0.2.2) with `StripedContextParallel` in the place of torch's
    ring of head-tail chunks.
    """
    compiled = compiles_model(job_config)
    if parallel_dims.tp_enabled:
        tp_mesh = parallel_dims.get_mesh("tp")
        loss_parallel = not job_config.parallelism.disable_loss_parallel
        apply_tensor_parallel(model, tp_mesh, loss_parallel=loss_parallel)
        model.tie()
        maybe_enable_async_tp(job_config, tp_mesh)
    if parallel_dims.cp_enabled:
        apply_ring(model, parallel_dims.get_mesh("cp"), job_config)
    if job_config.activation_checkpoint.mode != "none":
        apply_activation_checkpointing(
            model,
            job_config.activation_checkpoint,
            recompute_attention=job_config.memory.recompute_attention,
            offload=model.offload,
            compiled=compiled,
            base_folder=job_config.job.dump_folder,
        )
    if compiled:
        titan.apply_compile(model, job_config.compile)
    if job_config.compile.enable and "loss" in job_config.compile.components:
        head: nn.Module | None = model.output
        if isinstance(head, LossHead):
            head.compile_loss(job_config.compile.backend)
    if parallel_dims.fsdp_enabled:
        apply_fsdp(model, parallel_dims, job_config)
    elif parallel_dims.dp_replicate_enabled:
        mesh = parallel_dims.get_mesh("dp_replicate")
        titan.apply_ddp(model, mesh, enable_compile=compiled)
        # As FSDP here, DDP adds gradients up: the loss is a sum over tokens of all ranks, divided
        # by their number. torchtitan 0.2.2 leaves DDP's division by the replicas in place.
        model.register_comm_hook(mesh.get_group(), _sum_gradients)
    return model


def apply_ring(model: nn.Module, cp_mesh: DeviceMesh, job_config: StripedJobConfig) -> None:
    """Route every attention module through the ring of `cp_mesh`."""
    style = StripedContextParallel(
        layout=layout_of(job_config),
        rotate_method=job_config.striped_cp.rotate_method,
        kernel=job_config.striped_cp.kernel,
    )
    blocks = model.get_submodule("layers").children()
    modules = [block.get_submodule("attention.inner_attention") for block in blocks]
    for module in modules:
        parallelize_module(module, cp_mesh, style)
    routed = sum(isinstance(getattr(m.forward, "__self__", None), RingAttention) for m in modules)
    assert routed == len(modules), f"{routed} of {len(modules)} attention modules run the ring"
    ranks = " x ".join(map(str, cp_mesh.shape))
    logger.info(f"{routed} attention modules run the {style.layout.spec} ring of {ranks}")


def apply_fsdp(
    model: Transformer, parallel_dims: ParallelDims, job_config: StripedJobConfig
) -> None:
    """FSDP2 over the data-parallel and context-parallel ranks, replicated if so configured.

    torchtitan's groups (0.2.2): the embedding, every block, and the last layers, which by default
    stay gathered, as they are needed first in the backward pass. Tied ends are one group.
    """
    axes = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    training, cpu = job_config.training, cpu_host.is_cpu_host()
    settings: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(axes),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        ),
    }
    if training.enable_cpu_offload:
        # Pinning needs an accelerator.
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=not cpu)
    policy = job_config.parallelism.fsdp_reshard_after_forward
    # A pipeline would gather again for every microbatch.
    reshard = policy == "always" or (policy == "default" and not parallel_dims.pp_enabled)
    first, last = [model.tok_embeddings], [model.norm, model.output]
    if model.model_args.shape.tied:
        first, last = [], first + last
    for modules, resharded in (
        (first, reshard),
        *(([block], reshard) for block in model.layers.values()),
        (last, policy == "always"),
    ):
        present = [module for module in modules if module is not None]
        if present:
            fully_shard(present, reshard_after_forward=resharded, **settings)
    fully_shard(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a sum over tokens of all ranks, divided by their number.
            module.set_gradient_divide_factor(1.0)
            # torch 2.13 makes a PREMUL_SUM of that, which gloo does not have.
            module.set_force_sum_reduction_for_comms(cpu)


def _sum_gradients(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])
