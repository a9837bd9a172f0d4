"""What of torchtitan 0.2.2 and torch 2.13 is replaced, or used though it is not public.

A test holds every row against the installed versions: the name is there, and takes the parameters
that are relied on. A move to another version begins with this table.
"""

from typing import NamedTuple


class Private(NamedTuple):
    """A name that a release may change without a word.

    Attributes:
        name: module:qualified name.
        takes: its parameters, after `self`; None where it is not called.
        why: what it is needed for.
        until: when it can go.
    """

    name: str
    takes: tuple[str, ...] | None
    why: str
    until: str


_CHECKPOINT = "torchtitan.components.checkpoint:CheckpointManager."

REPLACED = (
    Private(
        "torchtitan.train:CheckpointManager",
        None,
        "saves in any state of the model, exact names, branches (recipes.checkpoint.manager)",
        "the trainer takes a checkpointer from its train spec",
    ),
    Private(
        _CHECKPOINT + "_find_load_step",
        ("folder",),
        "any name that contains step-N counts",
        "torchtitan matches whole names",
    ),
    Private(
        _CHECKPOINT + "_purge_stale_checkpoints",
        (),
        "likewise: it deletes a copy step-2-best",
        "torchtitan matches whole names",
    ),
    Private(
        _CHECKPOINT + "_async_wait",
        (),
        "an error of the file system names no folder",
        "torch's writer names the file",
    ),
    Private(
        "torchtitan.components.metrics:datetime",
        None,
        "runs of one minute share a folder (recipes.titan.tensorboard)",
        "torchtitan names folders by the second",
    ),
    Private(
        "torchtitan.tools.utils:get_peak_flops",
        ("device_name",),
        "a CPU is taken for an A100 (recipes.titan.cpu_host)",
        "torchtitan knows hosts without an accelerator",
    ),
    Private(
        "torchtitan.tools.profiling:torch",
        None,
        "the profiler asks for the activities [CPU, None] (recipes.titan.cpu_host)",
        "torchtitan knows hosts without an accelerator",
    ),
    Private(
        "torchtitan.models.llama3.infra.parallelize:CPUOffloadPolicy",
        ("pin_memory",),
        "pinning needs an accelerator (recipes.titan.cpu_host)",
        "torchtitan knows hosts without an accelerator",
    ),
    Private(
        "torchtitan.protocols.model_converter:_registry_model_converter_cls",
        None,
        "float8 drops emulate where recipe_name is set (recipes.titan.float8)",
        "torchtitan passes emulate on",
    ),
    Private(
        "torch._utils:_get_available_device_type",
        (),
        "torchtitan falls back to cuda (recipes.titan.cpu_host)",
        "torchtitan knows hosts without an accelerator",
    ),
    Private(
        "torch._utils:_get_device_module",
        ("device_type",),
        "likewise",
        "torchtitan knows hosts without an accelerator",
    ),
    Private(
        "torch.distributed.checkpoint._consolidate_hf_safetensors:json",
        None,
        "headers lack the format that transformers 4 looks for (recipes.titan.safetensors)",
        "torch writes it",
    ),
    Private(
        "torch.distributed.checkpoint:DefaultLoadPlanner.load_bytes",
        ("read_item", "value"),
        "states are unpickled as they come (recipes.checkpoint.files)",
        "torch loads them with weights_only",
    ),
    Private(
        "torch.distributed.rendezvous:_create_c10d_store",
        None,
        "restarted ranks read the addresses of dead ones (recipes.process.restarts)",
        "torchrun makes a store for every start",
    ),
)
USED = (
    Private(
        _CHECKPOINT + "_should_save",
        ("curr_step", "last_step"),
        "gradients are looked at before a save",
        "there is a hook before a save",
    ),
    Private(_CHECKPOINT + "_create_checkpoint_id", ("step", "folder"), "the folder of a step", ""),
    Private(
        "torchtitan.components.metrics:_get_metrics_rank",
        ("parallel_dims", "job_config"),
        "the rank that logs sums the run up",
        "it is public",
    ),
    Private(
        "torchtitan.models.llama3.infra.parallelize:_op_sac_save_list",
        None,
        "the operators that selective checkpointing keeps",
        "it is public",
    ),
    Private(
        "torch.distributed.distributed_c10d:_resolve_process_group",
        None,
        "operators are given the name of a group",
        "it is public",
    ),
    Private(
        "torch.distributed.distributed_c10d:_get_default_store",
        (),
        "ranks tell each other why they end, when collectives do not work any more",
        "it is public",
    ),
    Private(
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        None,
        "what .metadata says of a file",
        "it is public",
    ),
)
