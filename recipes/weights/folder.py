"""What is wrong with a folder of Hugging Face weights, found from file headers alone."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from recipes.models.decoder.weights import HEAD

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {"F64", "F32", "F16", "BF16"}


class BadFolder(ValueError):
    """The folder cannot be loaded; the message names the file and the cause."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        BadFolder: no such file, or it is something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadFolder(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise BadFolder(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadFolder(f"{path}: not a JSON object")
    return value


def check_folder(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Check that the weights of `shapes`, and no others, are in the folder, whole.

    Args:
        shapes: expected shapes by Hugging Face's names.

    Raises:
        BadFolder: files missing or cut off, weights missing or of another model.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in _files(folder):
        for name, shape in _weights(file):
            if name in found:
                raise BadFolder(f"{file}: has {name}, as {found[name][0]} does; delete one of them")
            found[name] = (file.name, shape)
    missing = [name for name in shapes if name not in found]
    if missing:
        why = ", tie_word_embeddings is not true" if missing == [HEAD] else _more(missing)
        raise BadFolder(f"{folder}: {missing[0]} is missing{why}")
    # Old conversions carry a buffer for the rotary frequencies.
    # Some that tie the two ends write both; transformers does not read the second.
    extra = [
        n for n in found if n not in shapes and not n.endswith("rotary_emb.inv_freq") and n != HEAD
    ]
    if extra:
        place = folder / found[extra[0]][0]
        raise BadFolder(f"{place}: {extra[0]} is no weight of the model{_more(extra)}")
    for name, shape in shapes.items():
        file_name, stored = found[name]
        if stored != tuple(shape):
            place = folder / file_name
            raise BadFolder(f"{place}: {name} is {list(stored)}, the flavor has {list(shape)}")


def _files(folder: Path) -> list[Path]:
    """The safetensors files of the folder, all of those that its index names."""
    present = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in weight_map.values()
        ):
            raise BadFolder(f"{folder / INDEX}: weight_map is no table of names of files")
        named = set(weight_map.values())
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            raise BadFolder(
                f"{folder / missing[0]}: missing, though {INDEX} names it{_more(missing)}"
            )
        surplus = [file for file in present if file.name not in named]
        if surplus:
            raise BadFolder(f"{surplus[0]}: not named by {INDEX}; move it elsewhere")
    elif [file.name for file in present] not in ([], [SINGLE]):
        raise BadFolder(f"{folder / INDEX}: missing, though the weights are in several files")
    if not present:
        meta = any(folder.glob("consolidated.*.pth"))
        why = ": its consolidated.*.pth are Meta's format" if meta else ""
        raise BadFolder(f"{folder}: no *.safetensors in it{why}")
    return present


def _weights(file: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in a safetensors file."""
    try:
        with safe_open(file, framework="pt") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
            for name, part in slices.items():
                if part.get_dtype() not in _DTYPES:
                    allowed = "float weights"
                    raise BadFolder(f"{file}: {name} is {part.get_dtype()}, {allowed} are needed")
            return [(name, tuple(part.get_shape())) for name, part in slices.items()]
    except SafetensorError as error:
        raise BadFolder(f"{file}: no whole safetensors file, load it again ({error})") from None


def _more(names: list[str]) -> str:
    return f" ({len(names) - 1} more)" if len(names) > 1 else ""
