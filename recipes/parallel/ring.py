"""The layout that the settings name, and the sequence lengths that suit it."""

import math

from recipes.config.schema import StripedJobConfig
from striped_cp.layout import Layout, Striped, layout_from_spec


def layout_of(config: StripedJobConfig) -> Layout:
    """The layout that `parallelism.context_parallel_load_balancer` and its block size name."""
    name = config.parallelism.context_parallel_load_balancer
    return Striped(config.striped_cp.block_size) if name == "striped" else layout_from_spec(name)


def seq_len_divisor(config: StripedJobConfig) -> int:
    """What sequence lengths must be a multiple of: the layout's rule, and S/cp split over tp."""
    cp = config.parallelism.context_parallel_degree
    tp = config.parallelism.tensor_parallel_degree
    return math.lcm(layout_of(config).divisor(cp), cp * tp)
