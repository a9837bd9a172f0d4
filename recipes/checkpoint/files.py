"""The checkpoint that a run is about to load: which folder, is it whole, does it fit the model.

torch's format (DCP) is a folder of `*.distcp` data files and a file `.metadata`, which is written
last: a folder without it is a save that did not finish. Only `.metadata` is read here.
"""

import json
import os
import pickle
import re
from enum import Enum, EnumMeta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting

METADATA = ".metadata"
# Beside the steps: where the line of training that they belong to began.
BRANCH = "branch.json"
# All that a checkpoint's `.metadata` names. torch reads it with plain pickle, which runs whatever
# a file names: a folder from elsewhere is read with this list first.
_KNOWN = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}


class ToLoad(NamedTuple):
    """A checkpoint that a run starts from; weights_only: without optimizer, data and step."""

    folder: Path
    weights_only: bool


def checkpoint_to_load(config: StripedJobConfig) -> ToLoad | None:
    """What torchtitan 0.2.2's CheckpointManager.load will read; None: nothing of torch's format.

    Raises:
        InvalidSetting: checkpoint.load_step names a checkpoint that is not there.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return None
    folder = Path(config.job.dump_folder, checkpoint.folder)
    if not under_way(config):
        path = checkpoint.initial_load_path
        if not path or checkpoint.initial_load_in_hf:
            return None
        return ToLoad(Path(path), checkpoint.initial_load_model_only)
    step = step_to_load(config)
    whole = finished_steps(folder)
    if step != -1 and step not in whole:
        allowed = f"-1 for the latest, or one of {sorted(whole)}" if whole else "-1"
        why = f"no finished checkpoint {folder / f'step-{step}'}"
        raise InvalidSetting("checkpoint.load_step", step, why, allowed)
    return None if step == -1 else ToLoad(folder / f"step-{step}", step == 0)


def step_to_load(config: StripedJobConfig) -> int:
    """The step of the run's own checkpoints that it will load; -1: there is none."""
    folder = Path(config.job.dump_folder, config.checkpoint.folder)
    step = config.checkpoint.load_step
    if step != -1 and (config.checkpoint.load_only or not branch_goes_on(folder, step)):
        return step
    return max(finished_steps(folder), default=-1)


def branch_goes_on(folder: Path, step: int) -> bool:
    """Whether the checkpoints in `folder` are those of a run that began at `step` of another.

    Then checkpoint.load_step = `step` has been obeyed: the same command, started again, goes on.
    """
    try:
        begun_at = json.loads((folder / BRANCH).read_text())["load_step"]
    except (OSError, ValueError, TypeError, KeyError):
        return False
    return begun_at == step and bool(finished_steps(folder))


def under_way(config: StripedJobConfig) -> bool:
    """Whether the run goes on from a checkpoint of its own.

    A folder without a finished one is what is left of a run that died in its first save.
    """
    folder = Path(config.job.dump_folder, config.checkpoint.folder)
    saved = finished_steps(folder) | exported_steps(folder)
    return bool(saved) or config.checkpoint.load_step != -1


def step_folders(folder: Path) -> dict[int, Path]:
    """The folders whose name is `step-N` and nothing more, whole or not, by N."""
    names = (
        (re.fullmatch(r"step-(0|[1-9]\d*)", path.name), path) for path in folder.glob("step-*")
    )
    return {int(name[1]): path for name, path in names if name and path.is_dir()}


def finished_steps(folder: Path) -> set[int]:
    """Steps of the checkpoints in `folder` that were written to their end."""
    return {n for n, path in step_folders(folder).items() if (path / METADATA).is_file()}


def exported_steps(folder: Path) -> set[int]:
    """Steps that lie in `folder` as an export to Hugging Face alone, with nothing to go on from.

    `config.json` is written last: an export without it did not finish.
    """
    exports = {n for n, path in step_folders(folder).items() if (path / "config.json").is_file()}
    return exports - finished_steps(folder)


def check_checkpoint_files(config: StripedJobConfig) -> None:
    """Check the checkpoint that the run is about to load.

    Raises:
        ValueError: it is damaged, no checkpoint at all, or of another model.
    """
    _check_initial(config)
    _check_names(config)
    found = checkpoint_to_load(config)
    if found is None:
        return
    metadata = read_whole(found.folder)
    _check_shapes(found.folder, metadata, config)
    goes_on = not found.weights_only and "train_state" not in config.checkpoint.exclude_from_loading
    if goes_on and "train_state.step" not in metadata.state_dict_metadata:
        raise ValueError(
            f"{found.folder}: holds weights only, and nothing to go on from (last_save_model_only "
            "was true); start from it with checkpoint.initial_load_path and another dump_folder"
        )


def _check_names(config: StripedJobConfig) -> None:
    """A file in the place of a step's folder would end the run when that step is saved."""
    folder = Path(config.job.dump_folder, config.checkpoint.folder)
    if os.path.isdir(folder / BRANCH):  # False also for a name that is too long
        raise ValueError(f"{folder / BRANCH}: a folder in the way of a file; move it elsewhere")
    for path in folder.glob("step-*") if config.checkpoint.enable else ():
        if path.is_file() and re.fullmatch(r"step-\d+", path.name):
            raise ValueError(f"{path}: a file in the way of a checkpoint; move it elsewhere")


def _check_initial(config: StripedJobConfig) -> None:
    """torchtitan 0.2.2 loads what a run starts from only where there is no checkpoint folder.

    Training removes one without a finished checkpoint (`recipes.checkpoint.manager`), unless it
    saves nothing.
    """
    checkpoint = config.checkpoint
    starts = checkpoint.enable and (checkpoint.initial_load_path or checkpoint.initial_load_in_hf)
    folder = Path(config.job.dump_folder, checkpoint.folder)
    if starts and checkpoint.load_only and folder.exists() and not under_way(config):
        raise ValueError(
            f"{folder}: holds no finished checkpoint, but hides the weights to start from; remove "
            "it, or name another checkpoint.folder (scripts/evaluate.py: --initial)"
        )


def read_metadata(folder: Path) -> Metadata:
    """`.metadata` of a checkpoint, read without running what it names.

    Raises:
        ValueError: there is none, it cannot be read, or it names what no checkpoint has.
    """
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(
            f"{folder}: no checkpoint of torch's format, or one whose save did not finish "
            f"({METADATA} is missing)"
        )
    try:
        with open(path, "rb") as file:
            metadata = _Unpickler(file).load()
    except _UnknownName as error:
        raise ValueError(f"{path}: names {error}, which no checkpoint does; not loaded") from None
    except Exception:  # whatever damaged bytes lead to
        metadata = None
    if not _is_whole(metadata):
        raise ValueError(f"{path}: damaged; copy the checkpoint anew or remove {folder}")
    return metadata


def _is_whole(metadata: object) -> bool:
    if not isinstance(metadata, Metadata):
        return False
    states, storage = metadata.state_dict_metadata, metadata.storage_data
    return (
        isinstance(states, dict)
        and isinstance(storage, dict)
        and all(
            isinstance(state, (TensorStorageMetadata, BytesStorageMetadata))
            for state in states.values()
        )
        and all(
            isinstance(part, _StorageInfo)
            and isinstance(part.relative_path, str)
            and type(part.offset) is type(part.length) is int
            for part in storage.values()
        )
    )


def load_error(error: CheckpointException, folder: Path | str) -> BaseException:
    """What an error of torch's loader says of the checkpoint; the error itself where it is none."""
    cause = next(iter(error.failures.values()))[0]
    if isinstance(cause, ValueError):
        return ValueError(f"{folder}: {cause}")
    torn = isinstance(cause, (EOFError, pickle.UnpicklingError))
    if torn or "PytorchStreamReader" in str(cause):
        return ValueError(f"{folder}: damaged, its data cannot be read; copy the checkpoint anew")
    return error


class _UnknownName(Exception):
    pass


def _member(kind: object, name: str) -> Enum:
    """A member of an enumeration, as Python 3.11.0 to 3.11.3 write it: getattr(kind, name)."""
    if not isinstance(kind, EnumMeta):
        raise _UnknownName("builtins.getattr")
    return kind[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        allowed = name in _KNOWN.get(module, ())
        if not allowed and module == "torch":
            allowed = isinstance(getattr(torch, name, None), torch.dtype)
        if not allowed:
            raise _UnknownName(f"{module}.{name}")
        return super().find_class(module, name)


def read_whole(folder: Path) -> Metadata:
    """`.metadata` of a checkpoint whose data files are all there.

    Raises:
        ValueError: as `read_metadata`, or a data file is missing or cut off.
    """
    metadata = read_metadata(folder)
    ends: dict[str, int] = {}
    for part in metadata.storage_data.values():
        name = str(part.relative_path)
        if Path(name).name != name:
            raise ValueError(f"{folder / METADATA}: names {name}, outside of its folder")
        ends[name] = max(ends.get(name, 0), part.offset + part.length)
    for name, end in ends.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size < end:
            what = f"has {size} bytes of {end}" if size >= 0 else "is missing"
            raise ValueError(f"{path}: {what}; copy the checkpoint anew or remove {folder}")
    return metadata


def _check_shapes(folder: Path, metadata: Metadata, config: StripedJobConfig) -> None:
    # Imported late: the planner and other readers of settings need no model.
    from recipes.models.decoder.args import model_args
    from recipes.models.decoder.weights import native_shapes

    stored = metadata.state_dict_metadata
    for name, shape in native_shapes(model_args(config)).items():
        entry = stored.get(name)
        if entry is None:
            raise ValueError(f"{folder}: {name} is missing, a checkpoint of another model")
        size = entry.size if isinstance(entry, TensorStorageMetadata) else None
        if size != shape:
            raise ValueError(
                f"{folder}: {name} is {list(size or [])}, model.flavor = "
                f'"{config.model.flavor}" has {list(shape)}'
            )
