"""Names and layouts of the weights: torchtitan's here, Hugging Face's in files.

torchtitan's adapter (0.2.2) translates the names and reorders the rows of the query and key
projections: Meta rotates neighbouring pairs (0, 1), (2, 3), ..., transformers the halves
(0, D/2), (1, D/2 + 1), .... This one adds tied embeddings and files of bounded size.

Llama 3.2 1B and 3B share one matrix between embedding and output projection, so their files have
no `lm_head.weight`. Here the two are parameters of their own: both start from the file's one,
and a folder that is written has both and says so (`tie_word_embeddings` false).
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.futures import Future
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from recipes.models.llama3.args import TransformerModelArgs
from recipes.models.llama3.model import Transformer
from recipes.titan import logger

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# 5 GB in bfloat16, about transformers' own limit.
_FILE_NUMEL = 2_500_000_000


class StateDictAdapter(Llama3StateDictAdapter):
    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None) -> None:
        # torchtitan would copy the division into files from the folder, and warn of a missing one.
        super().__init__(model_args, None)
        self.hf_assets_path = hf_assets_path
        self.fqn_to_index_mapping = file_numbers(hf_shapes(model_args))

    def _permute(self, w, n_heads_arg, dim1=None, dim2=None):
        return _as_whole(w, lambda x: super(StateDictAdapter, self)._permute(x, n_heads_arg))

    def _reverse_permute(self, w, n_heads_arg, dim1=None, dim2=None):
        return _as_whole(
            w, lambda x: super(StateDictAdapter, self)._reverse_permute(x, n_heads_arg)
        )

    def get_hf_storage_reader(
        self, path: str, from_quantized: bool = False
    ) -> HuggingFaceStorageReader:
        return TiedReader(path)


def _as_whole(
    weight: torch.Tensor, reorder: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Reorder the rows of a weight that may be spread over ranks.

    DTensor (torch 2.13) cannot take the heads of a weight apart where they do not divide over its
    shards: 8 key heads over 16 ranks end in "Cannot unflatten unevenly sharded tensor".
    """
    if not isinstance(weight, DTensor):
        return reorder(weight)
    mesh, placements = weight.device_mesh, weight.placements
    return distribute_tensor(reorder(weight.full_tensor()), mesh, placements, src_data_rank=None)


class TiedReader(HuggingFaceStorageReader):
    """Reads the embedding where a file has no output projection."""

    def read_metadata(self) -> Metadata:
        metadata = super().read_metadata()
        tensors = metadata.state_dict_metadata
        self.tied = HEAD not in tensors
        if self.tied:
            logger.info(
                f"{self.path}: embedding and output projection are one matrix in the file, and "
                "two from here on: each is trained by itself, and an export has both"
            )
            tensors[HEAD] = tensors[EMBEDDING]
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self.tied:
            items = [
                dataclasses.replace(
                    item, storage_index=dataclasses.replace(item.storage_index, fqn=EMBEDDING)
                )
                if item.storage_index.fqn == HEAD
                else item
                for item in plan.items
            ]
            plan = dataclasses.replace(plan, items=items)
        return super().read_data(plan, planner)


def native_shapes(model_args: TransformerModelArgs) -> dict[str, torch.Size]:
    """Shapes of the weights by torchtitan's names, in the order of the model."""
    with torch.device("meta"):
        model = Transformer(model_args)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def hf_shapes(model_args: TransformerModelArgs) -> dict[str, torch.Size]:
    """Shapes of the weights by Hugging Face's names."""
    adapter = Llama3StateDictAdapter(model_args, None)
    with torch.device("meta"):
        weights = {n: torch.empty(shape) for n, shape in native_shapes(model_args).items()}
    return {name: weight.shape for name, weight in adapter.to_hf(weights).items()}


def file_numbers(shapes: dict[str, torch.Size]) -> dict[str, int]:
    """In which file, counted from 1, every weight is written: in order, files filled up."""
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, shape in shapes.items():
        numel = math.prod(shape)
        if filled and filled + numel > _FILE_NUMEL:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += numel
    return numbers
