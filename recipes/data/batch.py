"""A batch as the data loader yields it, to this rank's part of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from recipes.config.schema import StripedJobConfig, compiles_model
from recipes.parallel.ring import layout_of
from recipes.titan import ParallelDims
from striped_cp import Documents, Layout, shard_sequence
from striped_cp.axes import local_positions


def plain_loss(loss: torch.Tensor) -> torch.Tensor:
    """The value of a loss that tensor parallelism may have left as a DTensor."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


class Microbatch(NamedTuple):
    """This rank's part of a batch.

    tokens, labels: int64 (B, S/P). context: int64 (1 or B, S/P), number of tokens that each token
    sees before it. kwargs: the model's other arguments, its "positions" (1 or B, S/P) and the
    "attention_masks" of the whole sequence.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    context: torch.Tensor
    kwargs: dict[str, Any]

    def to(self, device: torch.device | str) -> "Microbatch":
        """On the device; documents stay on the host, where the ring plans its kernel calls."""
        kwargs = {**self.kwargs, "positions": self.kwargs["positions"].to(device)}
        return Microbatch(
            self.tokens.to(device), self.labels.to(device), self.context.to(device), kwargs
        )


class BatchSharder:
    """Deals the tokens of a batch to the ranks of the `cp` mesh, and finds its documents.

    Trainer and validator share it, so that both see the same positions, masks, and labels. Labels
    come shifted from the loader: a token and its target travel together to one rank.
    """

    def __init__(self, job_config: StripedJobConfig, parallel_dims: ParallelDims) -> None:
        self.layout: Layout = layout_of(job_config)
        self.mask_documents = job_config.documents.mask
        self.reset_positions = job_config.documents.reset_positions
        self.cp_mesh: DeviceMesh | None = parallel_dims.get_optional_mesh("cp")
        self.pp_enabled = parallel_dims.pp_enabled
        self.compiled = compiles_model(job_config)

    def shard(self, input_dict: Mapping[str, torch.Tensor], labels: torch.Tensor) -> Microbatch:
        """
        Args:
            input_dict: "input" int64 (B, S); with packed documents also "boundaries" int64 (B, N),
                as `Documents` takes them.
            labels: int64 (B, S), -100 where there is nothing to predict.
        """
        tokens = input_dict["input"]
        documents = self._documents(input_dict.get("boundaries"))
        place = self._place(tokens.shape[1])
        context = place[None] if documents is None else documents.positions_in_document(place)
        positions = context if self.reset_positions else place[None]
        if self.pp_enabled:
            # A pipeline cuts every argument along the batch.
            positions = positions.expand(tokens.shape[0], -1)
        if self.cp_mesh is not None:
            tokens = shard_sequence(tokens, mesh=self.cp_mesh, layout=self.layout)
            labels = shard_sequence(labels, mesh=self.cp_mesh, layout=self.layout)
        kwargs = {"positions": positions, "attention_masks": documents}
        return Microbatch(tokens, labels, context, kwargs)

    def _place(self, seq_len: int) -> torch.Tensor:
        """Place in the sequence of every local token, int64 (S/P,)."""
        if self.cp_mesh is None:
            return torch.arange(seq_len)
        return local_positions(seq_len, mesh=self.cp_mesh, layout=self.layout)

    def _documents(self, boundaries: torch.Tensor | None) -> Documents | None:
        """None also for one document per row: plain causal attention is that, and faster.

        But not for compiled blocks, which would be compiled again at the first such batch.
        """
        if boundaries is None or not self.mask_documents:
            return None
        lengths = boundaries.diff(dim=1)
        if not self.compiled and ((lengths > 0).sum(dim=1) <= 1).all():
            return None
        return Documents(boundaries)
