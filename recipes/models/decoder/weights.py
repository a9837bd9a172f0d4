"""Names and layouts of the weights: torchtitan's here, Hugging Face's in files.

Meta rotates neighbouring pairs (0, 1), (2, 3), ... of a head, transformers the halves (0, D/2),
(1, D/2 + 1), ...: for families that keep Meta's order here, the rows of the query and key
projections are reordered on the way.
"""

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.protocols.state_dict_adapter import StateDictAdapter as TitanAdapter

from recipes.models.decoder.args import TransformerModelArgs
from recipes.models.decoder.model import Transformer

_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
}
_NAMES_IN_LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_FROM_HF = {hf: name for names in (_NAMES, _NAMES_IN_LAYER) for name, hf in names.items()}
HEAD = "lm_head.weight"
# 5 GB in bfloat16, about transformers' own limit.
_FILE_NUMEL = 2_500_000_000


def hf_name(name: str) -> str:
    """Hugging Face's name of a weight: layers.0.attention.wq.weight is
    model.layers.0.self_attn.q_proj.weight."""
    module, _, kind = name.rpartition(".")
    layer = re.match(r"layers\.\d+\.", module)
    if layer is None:
        return f"{_NAMES[module]}.{kind}"
    return f"model.{layer[0]}{_NAMES_IN_LAYER[module[layer.end() :]]}.{kind}"


def native_name(name: str) -> str:
    """Inverse of `hf_name`."""
    module, _, kind = name.rpartition(".")
    layer = re.match(r"model\.(layers\.\d+\.)", module)
    if layer is None:
        return f"{_FROM_HF[module]}.{kind}"
    return f"{layer[1]}{_FROM_HF[module[layer.end() :]]}.{kind}"


class StateDictAdapter(TitanAdapter):
    """torchtitan's way to Hugging Face weights and back."""

    def __init__(self, model_args: TransformerModelArgs, hf_assets_path: str | None) -> None:
        # torchtitan would copy the division into files from the folder, and warn of a missing one.
        super().__init__(model_args, None)
        self.hf_assets_path = hf_assets_path
        self.shape = model_args.shape
        self.reorders = not model_args.family.rotates_halves
        self.fqn_to_index_mapping = file_numbers(hf_shapes(model_args))

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        renamed = {
            hf_name(name): self._reordered(name, weight, neighbours=False)
            for name, weight in state_dict.items()
        }
        if self.shape.tied:
            renamed.pop(HEAD, None)  # it is the embedding
        return renamed

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        names = {name: native_name(name) for name in hf_state_dict}
        return {
            name: self._reordered(name, hf_state_dict[theirs], neighbours=True)
            for theirs, name in names.items()
        }

    def _reordered(self, name: str, weight: Any, neighbours: bool) -> Any:
        """Rows of a query or key projection with the two of every pair side by side, or apart."""
        if not self.reorders or not re.search(r"\.attention\.w[qk]\.", name):
            return weight
        pairs = (2, -1) if neighbours else (-1, 2)

        def reorder(rows: torch.Tensor) -> torch.Tensor:
            heads = rows.unflatten(0, (-1, self.shape.head_dim)).unflatten(1, pairs)
            return heads.transpose(1, 2).flatten(0, 2)

        return _as_whole(weight, reorder)


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


def native_shapes(model_args: TransformerModelArgs) -> dict[str, torch.Size]:
    """Shapes of the weights by torchtitan's names, in the order of the model."""
    with torch.device("meta"):
        model = Transformer(model_args)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def hf_shapes(model_args: TransformerModelArgs) -> dict[str, torch.Size]:
    """Shapes of the weights by Hugging Face's names."""
    return {hf_name(name): shape for name, shape in native_shapes(model_args).items()}


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
