"""torchtitan 0.2.2 made to do what it does not: every patch of it, in one room.

README.md beside this file lists what is replaced, and every private name that is used anywhere.

The names of torchtitan that many modules use come from here, each imported when it is first asked
for: `from recipes.titan import logger` takes a millisecond, `ParallelDims` all of torchtitan.
"""

import importlib
from typing import TYPE_CHECKING, Any

from recipes.titan.first_import import load_alone

if TYPE_CHECKING:
    from torchtitan.components.dataloader import BaseDataLoader as BaseDataLoader
    from torchtitan.components.loss import IGNORE_INDEX as IGNORE_INDEX
    from torchtitan.components.loss import LossFunction as LossFunction
    from torchtitan.components.tokenizer import HuggingFaceTokenizer as HuggingFaceTokenizer
    from torchtitan.config import ConfigManager as ConfigManager
    from torchtitan.config import JobConfig as JobConfig
    from torchtitan.config import job_config as job_config
    from torchtitan.distributed import ParallelDims as ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.hf_datasets.text_datasets import DATASETS as DATASETS
    from torchtitan.tools.logging import init_logger as init_logger
    from torchtitan.tools.logging import logger as logger
    from torchtitan.tools.utils import device_module as device_module
    from torchtitan.tools.utils import device_type as device_type

    __all__ = ["dist_utils"]

# Modules that need nothing of torchtitan but each other, in the order in which they do.
_ALONE = ("torchtitan.tools.logging", "torchtitan.config.job_config", "torchtitan.config.manager")
_FROM = {
    "BaseDataLoader": "torchtitan.components.dataloader",
    "ConfigManager": "torchtitan.config.manager",
    "DATASETS": "torchtitan.hf_datasets.text_datasets",
    "HuggingFaceTokenizer": "torchtitan.components.tokenizer",
    "IGNORE_INDEX": "torchtitan.components.loss",
    "JobConfig": "torchtitan.config.job_config",
    "LossFunction": "torchtitan.components.loss",
    "ParallelDims": "torchtitan.distributed",
    "device_module": "torchtitan.tools.utils",
    "device_type": "torchtitan.tools.utils",
    "init_logger": "torchtitan.tools.logging",
    "logger": "torchtitan.tools.logging",
}
_MODULES = {"dist_utils": "torchtitan.distributed.utils", "job_config": _ALONE[1]}


def __getattr__(name: str) -> Any:
    module_name = _FROM.get(name) or _MODULES.get(name)
    if module_name is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if module_name in _ALONE:
        for alone in _ALONE[: _ALONE.index(module_name) + 1]:
            module = load_alone(alone)
    else:
        module = importlib.import_module(module_name)
    return module if name in _MODULES else getattr(module, name)
