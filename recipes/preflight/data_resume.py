"""Refuse at startup a checkpoint whose positions in the data cannot be used.

torchtitan 0.2.2 would stop too, but late and with "Missing key in checkpoint state_dict:
dataloader.dp_rank_1", or drop the positions of ranks that are gone.
"""

import re
from typing import Any

from recipes.checkpoint.files import checkpoint_to_load, read_metadata
from recipes.data.loader import REMEDY, check_degree


def check_checkpoint(config: Any, dp_degree: int) -> None:
    """Check the data-parallel degree of the checkpoint that the run is about to load, if any.

    Raises:
        ValueError: the checkpoint has another degree, or was written by another data loader.
    """
    found = checkpoint_to_load(config)
    excluded = "dataloader" in config.checkpoint.exclude_from_loading
    if found is None or found.weights_only or excluded:
        return
    folder = found.folder
    keys = read_metadata(folder).state_dict_metadata
    saved = [key for key in keys if re.fullmatch(r"dataloader\.dp_rank_\d+\.place", key)]
    if not saved and any(key.startswith("dataloader.") for key in keys):
        raise ValueError(
            f"{folder}: its positions in the data were written by another data loader; resume it "
            f"with that one, {REMEDY}"
        )
    if saved:
        try:
            check_degree(len(saved), dp_degree)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
