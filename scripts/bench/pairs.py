"""How much of what a kernel computes is visible."""

from __future__ import annotations

import numpy as np
import torch

from striped_cp import Layout
from striped_cp.blocks import causal_pairs
from striped_cp.kernels.flex import BLOCK, tile_block_mask
from striped_cp.tiles import Tile

from .case import Case


def computed_over_visible(case: Case, layout: Layout) -> float:
    """(query, key) pairs that all ranks' kernel calls cover, over those that a token may see."""
    size = case.world_size // case.ulysses
    tiles = [tile for rank in range(size) for tile in case.tiles(layout, size, rank)]
    name = case.chosen_kernel().name
    computed = sum(_block_pairs(tile) if name == "flex" else tile.pairs for tile in tiles)
    lengths = np.array(case.documents or [case.seq_len])
    rows = 1 if case.documents is None else case.batch  # what a tile counts
    return computed / (rows * int(causal_pairs(lengths, case.window).sum()))


def _block_pairs(tile: Tile) -> int:
    """FlexAttention computes whole blocks of its mask."""
    mask = tile_block_mask(tile, torch.device("cpu"))
    counts = (mask.kv_num_blocks, mask.full_kv_num_blocks)
    return BLOCK**2 * sum(int(x.sum()) for x in counts if x is not None)
