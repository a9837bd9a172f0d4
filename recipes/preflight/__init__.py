"""Before a run starts: its settings against each other, the model, its files and its host."""

from collections.abc import Callable, Sequence

from recipes.config.load import read_config
from recipes.config.schema import StripedJobConfig
from recipes.preflight.checks import check_config, check_launch
from recipes.preflight.defaults import give_way
from recipes.preflight.mixture import check_mixture


def load_config(
    args: Sequence[str], world_size: int | None = None, notes: list[str] | None = None
) -> StripedJobConfig:
    """Read the settings of `args` and check them.

    Args:
        args: command line, e.g. `["--job.config_file", "x.toml", "--training.steps", "5"]`.
        world_size: number of ranks of a run that is about to start; its degrees, batch sizes and
            files are checked too. None: only what the settings say by themselves.
        notes: gets a line for every default that gave way to what was asked for.

    Raises:
        ValueError: one line that names the file, the key, its value and what is allowed.
    """

    def check(config: StripedJobConfig, is_set: Callable[[str], bool]) -> None:
        changed = give_way(config, is_set)
        if notes is not None:
            notes.extend(changed)
        check_config(config)
        check_mixture(config, is_set)
        if world_size is not None:
            check_launch(config, world_size)

    return read_config(args, check)
