"""torchtitan's converter to float8 linear layers, with two of its options made to count.

torchtitan 0.2.2 drops `emulate` where `recipe_name` is set, so that a recipe cannot be tried
without the hardware, and float8 all-gathers where FSDP shards over context-parallel ranks alone.
"""

import dataclasses
from typing import Any

from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import model_converter

NAME = "quantize.linear.float8"


class Float8Converter(Float8LinearConverter):
    config: Any  # torchao's Float8LinearConfig

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        settings = job_config.quantize.linear.float8
        gathers = settings.enable_fsdp_float8_all_gather and parallel_dims.fsdp_enabled
        self.config = dataclasses.replace(
            self.config, emulate=settings.emulate, enable_fsdp_float8_all_gather=gathers
        )
        self.precompute_scale = gathers and settings.precompute_float8_dynamic_scale_for_fsdp


def register() -> None:
    """Take the place of torchtitan's converter of the same name."""
    model_converter._registry_model_converter_cls[NAME] = Float8Converter
