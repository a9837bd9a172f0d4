"""`Run`: everything about a training run that its memory and its speed depend on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from recipes.models.shapes import ModelShape
from recipes.parallel.degrees import (
    check_heads,
    check_length,
    check_microbatches,
    check_stages,
    check_ulysses,
)
from recipes.parallel.ring import named_layout
from recipes.planner.hardware import Gpu


@dataclass(frozen=True)
class Levers:
    """What trades time for memory; the names are those of the TOML sections.

    Attributes:
        checkpointing: "none", "full", "selective" (torchtitan's selective "op" policy), or
            "every_N": every N-th layer.
        recompute_attention: run the ring again in the backward pass instead of keeping its output.
        offload_checkpoints: checkpointed block inputs wait in host memory.
        loss_chunk_tokens: tokens whose logits exist at once; 0: all of this rank's.
        mlp_chunk_tokens: tokens whose MLP activations exist at once; 0: all of this rank's.
    """

    checkpointing: str = "full"
    recompute_attention: bool = False
    offload_checkpoints: bool = False
    loss_chunk_tokens: int = 2048
    mlp_chunk_tokens: int = 0

    @property
    def whole_blocks(self) -> float:
        """Share of the layers of which only the input is kept."""
        every = self.checkpointing.removeprefix("every_")
        return 1 / int(every) if every.isdecimal() else float(every == "full")


@dataclass(frozen=True)
class Run:
    """One training run; degrees multiply to the number of GPUs.

    Attributes:
        local_batch: sequences per data-parallel rank and forward pass.
        gradient_accumulation: forward passes per optimizer step.
        documents: lengths of the packed documents of every sequence; empty: one document.
        slowest_pairs: visible pairs of the slowest rank in every ring step, of one sequence, by the
            window of a layer; empty: those of one document without windows.
        kernel: key of `Gpu.kernels`.
        rotate_method: "ring" or "allgather".
        layout: "striped", "headtail" or "contiguous".
        repeated_kv: keys and values are repeated to the query heads before they travel, as
            torchtitan of 2024 did; this project never does.
        parameter_bytes: per parameter as the optimizer sees it (4, or 2 for training.dtype bf16);
            gradients have the same dtype and Adam keeps two more copies.
        virtual_stages: pipeline stages per rank.
        ulysses: neighbouring ranks of cp that trade sequence for heads.
        deterministic_on: multiprocessors of the GPU, with debug.deterministic; 0 without.
    """

    shape: ModelShape
    seq_len: int
    local_batch: int = 1
    gradient_accumulation: int = 1
    documents: tuple[int, ...] = ()
    slowest_pairs: Mapping[int | None, tuple[float, ...]] = field(default_factory=dict)
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    levers: Levers = field(default_factory=Levers)
    kernel: str = "flash"
    rotate_method: str = "ring"
    layout: str = "striped"
    block_size: int = 1
    repeated_kv: bool = False
    parameter_bytes: int = 4
    float8: bool = False
    compiled: bool = False
    async_tp: bool = False
    loss_parallel: bool = True
    reshard_after_forward: str = "default"
    pp_schedule: str = "1F1B"
    pp_microbatch: int = 1
    virtual_stages: int = 1
    ulysses: int = 1
    deterministic_on: int = 0

    @property
    def mesh(self) -> dict[str, int]:
        """The degrees by name."""
        return {
            name: getattr(self, name) for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp")
        }

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def local_tokens(self) -> int:
        """Tokens of one sequence on one rank: S / P."""
        return self.seq_len // self.cp

    @property
    def ring(self) -> int:
        """Ranks of the ring."""
        return self.cp // self.ulysses

    @property
    def ring_tokens(self) -> int:
        """Tokens of one sequence in a tile of the ring."""
        return self.seq_len // self.ring

    @property
    def ring_kv_dim(self) -> int:
        """Width of the keys, and of the values, that travel: copied for ranks that share heads."""
        kv_heads = self.shape.n_kv_heads // self.tp
        copies = math.lcm(kv_heads, self.ulysses) // kv_heads
        return self.shape.query_dim if self.repeated_kv else copies * self.shape.kv_dim

    @property
    def fsdp_degree(self) -> int:
        """Ranks that share one copy of the parameters: torchtitan shards over dp_shard x cp."""
        return self.dp_shard * self.cp

    @property
    def microbatch(self) -> int:
        """Sequences per forward of one pipeline stage."""
        return self.pp_microbatch if self.pp > 1 else self.local_batch

    @property
    def microbatches(self) -> int:
        """Microbatches per forward pass of the trainer (pipeline parallelism; 1 without)."""
        return self.local_batch // self.pp_microbatch if self.pp > 1 else 1

    @property
    def layers_per_rank(self) -> int:
        """Layers of the fullest pipeline rank."""
        return math.ceil(self.shape.n_layers / self.pp)

    @property
    def stays_gathered(self) -> bool:
        """Whether FSDP keeps parameters unsharded after the forward pass.

        torchtitan's "default" reshards without, and does not reshard with, pipeline parallelism.
        """
        if self.reshard_after_forward == "default":
            return self.pp > 1
        return self.reshard_after_forward == "never"

    @property
    def data_parallel(self) -> int:
        """Ranks that read sequences of their own, or rather groups of cp * tp * pp ranks."""
        return self.dp_replicate * self.dp_shard

    @property
    def sequences_per_step(self) -> int:
        """Sequences of the whole job per optimizer step."""
        return self.local_batch * self.gradient_accumulation * self.data_parallel

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.seq_len

    @property
    def pairs(self) -> float:
        """Visible (query, key) pairs of one sequence, the mean over the layers."""
        return self.shape.visible_pairs(self.documents or (self.seq_len,))

    @property
    def levers_in_use(self) -> str:
        """Short names of the memory levers that are on."""
        levers = self.levers
        names = [f"ac={levers.checkpointing}"]
        names += ["recompute_attention"] if levers.recompute_attention else []
        names += ["offload_checkpoints"] if levers.offload_checkpoints else []
        names += [f"loss_chunk={levers.loss_chunk_tokens}"] if levers.loss_chunk_tokens else []
        names += [f"mlp_chunk={levers.mlp_chunk_tokens}"] if levers.mlp_chunk_tokens else []
        return " ".join(names)


def check(run: Run, gpu: Gpu) -> None:
    """Raise ValueError, one line, for degrees that training would refuse or that make no sense."""
    shape = run.shape
    check_heads(shape.n_kv_heads, run.tp)
    layout = named_layout(run.layout, run.block_size)
    check_ulysses(run.ulysses, shape.n_heads, run.cp, run.tp)
    check_length("training.seq_len", run.seq_len, layout, run.cp, run.tp, run.ulysses)
    if run.pp > 1:
        check_stages(run.pp_schedule, run.pp, run.pp * run.virtual_stages, shape.n_layers)
        check_microbatches(run.pp_schedule, run.local_batch, run.pp_microbatch, run.pp)
    if run.kernel not in gpu.kernels:
        raise ValueError(
            f'striped_cp.kernel = "{run.kernel}": no published rate on {gpu.name}; '
            f"known: {', '.join(gpu.kernels)}"
        )
    if run.documents and sum(run.documents) != run.seq_len:
        raise ValueError(
            f"--documents add up to {sum(run.documents)} tokens, training.seq_len is {run.seq_len}"
        )
