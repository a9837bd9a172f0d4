"""Refuse at startup a checkpoint whose positions in the data cannot be used.

torchtitan 0.2.2 would stop too, but late and with "Missing key in checkpoint state_dict:
dataloader.dp_rank_1", or drop the positions of ranks that are gone.
"""

import re
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader

from recipes.data.loader import REMEDY, check_degree


def check_checkpoint(config: Any, dp_degree: int) -> None:
    """Check the data-parallel degree of the checkpoint that the run is about to load, if any.

    Raises:
        ValueError: the checkpoint has another degree, or was written by another data loader.
    """
    folder = _checkpoint_to_load(config)
    if folder is None or "dataloader" in config.checkpoint.exclude_from_loading:
        return
    keys = FileSystemReader(folder).read_metadata().state_dict_metadata
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


def _checkpoint_to_load(config: Any) -> Path | None:
    """The folder from which torchtitan 0.2.2's CheckpointManager.load takes the loader's state."""
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return None
    folder = Path(config.job.dump_folder, checkpoint.folder)
    if not folder.exists():
        path = checkpoint.initial_load_path
        return Path(path) if path and not checkpoint.initial_load_model_only else None
    step = checkpoint.load_step
    if step == -1:
        names = (re.search(r"step-(\d+)", f.parent.name) for f in folder.glob("*/.metadata"))
        step = max((int(name[1]) for name in names if name), default=0)
    found = folder / f"step-{step}"
    return found if step > 0 and found.is_dir() else None
