"""How a run reads its settings: a TOML file, and what the command line puts over it.

Both go through torchtitan's own parser, between the checks of `recipes.config.types` and those of
the caller. Nothing here touches a process group or a device: the planner reads its TOML the same
way as the trainer.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

from recipes.config.schema import StripedJobConfig
from recipes.config.types import CannotRun, InvalidSetting, check_options, check_table, entry_of
from recipes.titan import ConfigManager

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


# Told the settings, and whether the file or the command line has a key.
Check = Callable[[StripedJobConfig, Callable[[str], bool]], None]
_DEFAULT = " (default)"


def read_config(args: Sequence[str], check: Check) -> StripedJobConfig:
    """Read the TOML file that `args` names and the overrides in `args`.

    Args:
        args: command line, e.g. `["--job.config_file", "x.toml", "--training.steps", "5"]`.
        check: raises `InvalidSetting` or `CannotRun` for settings that cannot be used.

    Raises:
        ValueError: one line that names the file, the key, its value and what is allowed.
    """
    path = _config_file(args)
    table = read_toml(path) if path is not None else {}
    try:
        table = check_table(table, StripedJobConfig)
        _refuse_code(table)
        config = _parse(args, table)
        check_table(asdict(config), StripedJobConfig)  # the parser takes integers of any size
        check(config, lambda key: not _origin(key, path, table, args).endswith(_DEFAULT))
    except InvalidSetting as error:
        raise ValueError(f"{_origin(error.key, path, table, args)}: {error}") from None
    except CannotRun as error:
        raise ValueError(f"{path or 'command line'}: {error}") from None
    if config.validation.seq_len == -1:
        config.validation.seq_len = config.training.seq_len
    if config.validation.local_batch_size == -1:
        config.validation.local_batch_size = config.training.local_batch_size
    return config


def _refuse_code(table: dict[str, Any]) -> None:
    """A recipe is data: only who starts the run may name code to run."""
    module = table.get("experimental", {}).get("custom_import", "")
    if module:
        key, why = "experimental.custom_import", "a file may not name code to run"
        raise InvalidSetting(key, module, why, f"--{key} {module} on the command line")


class _Manager(ConfigManager):
    """torchtitan's parser (0.2.2) over a table that was read and checked before.

    Its own validation only warns about a missing tokenizer and about deprecated keys, which
    `recipes.preflight` refuses.
    """

    def __init__(self, table: dict[str, Any]) -> None:
        super().__init__(config_cls=StripedJobConfig)
        self._table = table

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any]:
        return self._table

    def _maybe_add_custom_config(
        self, args: list[str], toml_values: dict[str, Any]
    ) -> type[StripedJobConfig]:
        """Not the module of job.custom_config_module, which `recipes.config.values` refuses: to
        import it would run code that a recipe names."""
        return StripedJobConfig

    def _dict_to_dataclass(self, cls: type, data: dict[str, Any]) -> Any:
        """Also of arrays of tables, which torchtitan leaves as they are."""
        entries = {
            name: [entry(**value) for value in data[name]]
            for name, kind in get_type_hints(cls).items()
            if name in data and (entry := entry_of(kind)) is not None
        }
        return super()._dict_to_dataclass(cls, {**data, **entries})

    def _validate_config(self) -> None:
        pass


def _parse(args: Sequence[str], table: dict[str, Any]) -> StripedJobConfig:
    """Put the command line over the table; the parser's framed error messages become one line."""
    try:
        check_options(args, StripedJobConfig)
    except InvalidSetting as error:
        raise ValueError(f"command line: {error}") from None
    messages = io.StringIO()
    try:
        with contextlib.redirect_stderr(messages):
            config = _Manager(table).parse_args(list(args))
    except SystemExit as exit_:
        if not exit_.code:
            raise  # --help
        lines = [line.strip("│ ") for line in messages.getvalue().splitlines()[1:]]
        end = next((i for i, line in enumerate(lines) if line.startswith("─")), len(lines))
        # The parser writes --training.seq-len for training.seq_len.
        message = re.sub(
            r"--[\w.-]+", lambda m: m[0][:2] + m[0][2:].replace("-", "_"), " ".join(lines[:end])
        )
        raise ValueError(f"command line: {message}") from None
    assert isinstance(config, StripedJobConfig)
    return config


def _config_file(args: Sequence[str]) -> str | None:
    names = ("--job.config_file", "--job.config-file")
    path = None
    for i, arg in enumerate(args):
        name, equals, value = arg.partition("=")
        if name in names:  # the last one counts, as for every other setting
            path = value if equals else (args[i + 1] if i + 1 < len(args) else None)
    return path


def read_toml(path: str) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ValueError: one line, if it cannot be read.
    """
    if not os.path.isfile(path):
        what = "a folder" if os.path.isdir(path) else "no such file"
        name = path or '""'
        raise ValueError(f"{name}: {what}; --job.config_file names a TOML file")
    try:
        return tomllib.loads(Path(path).read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: not valid TOML: nested too deeply") from None


def _origin(key: str, path: str | None, table: dict[str, Any], args: Sequence[str]) -> str:
    """Where the user set `key`: the command line, the file, or nowhere."""
    section, _, name = key.rpartition(".")
    options = f"__{key}", f"__{section}.no_{name}"
    if any(arg.partition("=")[0].replace("-", "_") in options for arg in args):
        return "command line"
    place: Any = table
    for part in key.split("."):
        if isinstance(place, list) and part.isdecimal():
            place = place[int(part) - 1]
        else:
            place = place.get(part, {}) if isinstance(place, dict) else {}
    return path if path and place != {} else f"{path or 'command line'}{_DEFAULT}"
