"""Which degrees, lengths and batches go together: asked by the startup checks and the planner.

In integers alone. Every refusal is an `InvalidSetting`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from recipes.config.schema import StripedJobConfig
from recipes.config.types import InvalidSetting
from recipes.config.values import get
from recipes.parallel.ring import length_divisor

if TYPE_CHECKING:
    from striped_cp import Layout

SCHEDULE = "parallelism.pipeline_parallel_schedule"
# All other schedules of torchtitan 0.2.2 have two stages or more on a rank.
_ONE_STAGE_A_RANK = ("GPipe", "1F1B")


def shard_degree(ranks: int, *, replicate: int, shard: int, cp: int, tp: int, pp: int) -> int:
    """The data-parallel shard degree on `ranks` ranks, -1 filled with those left over."""
    others = replicate * cp * tp * pp
    product = (
        f"data_parallel_replicate {replicate} * context_parallel {cp} * tensor_parallel {tp} * "
        f"pipeline_parallel {pp}"
    )
    if shard == -1:
        if ranks % others:
            degrees = {
                "context_parallel_degree": cp,
                "tensor_parallel_degree": tp,
                "pipeline_parallel_degree": pp,
                "data_parallel_replicate_degree": replicate,
            }
            name = max(degrees, key=degrees.__getitem__)
            why = f"{product} = {others} does not divide {ranks} ranks"
            allowed = f"degrees whose product divides {ranks}"
            raise InvalidSetting(f"parallelism.{name}", degrees[name], why, allowed)
        shard = ranks // others
    elif shard * others != ranks:
        why = f"times {product} is {shard * others}, the ranks are {ranks}"
        allowed = "-1 for the ranks left over, or degrees whose product is the number of ranks"
        raise InvalidSetting("parallelism.data_parallel_shard_degree", shard, why, allowed)
    if replicate > 1 and shard * cp == 1 and tp * pp > 1:
        why = "replication without sharding does not combine with tensor or pipeline parallelism"
        key = "parallelism.data_parallel_replicate_degree"
        raise InvalidSetting(key, replicate, why, "1, or data_parallel_shard_degree above 1")
    return shard


def resolved_shard(config: StripedJobConfig, ranks: int) -> int:
    """`shard_degree` of the settings."""
    parallelism = config.parallelism
    return shard_degree(
        ranks,
        replicate=parallelism.data_parallel_replicate_degree,
        shard=parallelism.data_parallel_shard_degree,
        cp=parallelism.context_parallel_degree,
        tp=parallelism.tensor_parallel_degree,
        pp=parallelism.pipeline_parallel_degree,
    )


def gradient_accumulation(global_batch: int, local_batch: int, data_parallel: int) -> int:
    """Forward passes per optimizer step; 1 where `global_batch` is -1."""
    step = local_batch * data_parallel
    if global_batch == -1:
        return 1
    if global_batch % step:
        why = f"not a multiple of local_batch_size * data-parallel degree = {step}"
        allowed = f"multiples of {step}, or -1"
        raise InvalidSetting("training.global_batch_size", global_batch, why, allowed)
    return global_batch // step


def check_heads(kv_heads: int, tp: int) -> None:
    """Check that every tensor-parallel rank has whole groups of query heads."""
    if kv_heads % tp:
        why, allowed = f"does not divide the {kv_heads} key heads", f"divisors of {kv_heads}"
        raise InvalidSetting("parallelism.tensor_parallel_degree", tp, why, allowed)


def check_ulysses(degree: int, heads: int, cp: int, tp: int) -> None:
    """Check that ranks which share heads have equal parts of the ranks and of the heads."""
    key = "striped_cp.ulysses_degree"
    local = heads // tp
    common = math.gcd(cp, local)
    allowed = f"divisors of {common}"
    if cp % degree:
        why = f"does not divide parallelism.context_parallel_degree = {cp}"
        raise InvalidSetting(key, degree, why, allowed)
    if local % degree:
        why = f"does not divide the {local} query heads of a tensor-parallel rank"
        raise InvalidSetting(key, degree, why, allowed)


def check_length(key: str, seq_len: int, layout: Layout, cp: int, tp: int, ulysses: int) -> None:
    """Check that the layout, and tensor parallelism within it, divide a sequence."""
    divisor = length_divisor(layout, cp, tp, ulysses)
    if seq_len % divisor == 0:
        return
    below = seq_len // divisor * divisor
    nearest = " and ".join(str(s) for s in (below, below + divisor) if s > 0)
    degrees = [f"parallelism.context_parallel_degree = {cp}"]
    block_size = getattr(layout, "block_size", 1)
    if block_size > 1:
        degrees.append(f"striped_cp.block_size = {block_size}")
    if tp > 1:
        degrees.append(f"parallelism.tensor_parallel_degree = {tp}")
    allowed = f"multiples of {divisor} (nearest {nearest})"
    raise InvalidSetting(key, seq_len, f"not divisible by {' times '.join(degrees)}", allowed)


def check_microbatches(schedule: str, batch: int, size: int, pp: int) -> None:
    """Check that the schedule can run a batch of `batch` sequences, `size` at a time."""
    if batch % size:
        key = "parallelism.pipeline_parallel_microbatch_size"
        allowed = f"divisors of training.local_batch_size = {batch}"
        raise InvalidSetting(key, size, "does not divide the batch", allowed)
    count = batch // size
    microbatches = f"training.local_batch_size = {batch} makes {count} microbatches of {size}"
    if schedule == "1F1B" and count < pp:
        allowed = '"GPipe", or as many microbatches as pipeline_parallel_degree'
        why = f"needs {pp} microbatches at least, {microbatches}"
        raise InvalidSetting(SCHEDULE, schedule, why, allowed)
    rounds = max(1, count // pp)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and count % rounds:
        allowed = f"multiples of pipeline_parallel_degree = {pp}"
        why = f"does not divide into rounds, {microbatches}"
        raise InvalidSetting(SCHEDULE, schedule, why, f"a number of microbatches: {allowed}")


def stages_a_rank(config: StripedJobConfig, layers: int) -> int:
    """Pipeline stages of every rank, of a model of `layers` layers."""
    parallelism = config.parallelism
    per_stage = parallelism.pipeline_parallel_layers_per_stage
    if parallelism.pipeline_parallel_degree == 1:
        return 1
    if per_stage is None:
        return 1 if parallelism.pipeline_parallel_schedule in _ONE_STAGE_A_RANK else 2
    stages = -(-(layers + sum(less_layers(config))) // per_stage)
    check_stage_count(config, "parallelism.pipeline_parallel_layers_per_stage", stages)
    return stages // parallelism.pipeline_parallel_degree


def less_layers(config: StripedJobConfig) -> tuple[int, int]:
    """Layers that the embedding counts as, and norm and output projection."""
    parallelism = config.parallelism
    return (
        parallelism.pipeline_parallel_first_stage_less_layers,
        parallelism.pipeline_parallel_last_stage_less_layers,
    )


def check_stage_count(config: StripedJobConfig, key: str, stages: int) -> None:
    """Check that the schedule takes the number of stages that the value of `key` makes."""
    pp = config.parallelism.pipeline_parallel_degree
    schedule = config.parallelism.pipeline_parallel_schedule
    one = schedule in _ONE_STAGE_A_RANK
    wanted = "1 stage" if one else "2 stages or more"
    a_rank, rest = divmod(stages, pp)
    fits = a_rank == 1 if one else a_rank >= 2
    if rest or not fits or (schedule == "ZBVZeroBubble" and a_rank != 2):
        why = f"makes {stages} stages for {pp} ranks, schedule {schedule} takes {wanted} each"
        raise InvalidSetting(key, get(config, key), why, "unset for torchtitan's choice")


def check_stages(
    schedule: str, pp: int, stages: int, layers: int, less: tuple[int, int] = (1, 1)
) -> None:
    """Check that every stage gets a part of the model, as torchtitan 0.2.2 deals it out."""
    if (layers + sum(less)) // stages < max(1, *less):
        why = f"schedule {schedule} makes {stages} stages, too many for the {layers} layers"
        allowed = "fewer ranks, or a schedule of one stage a rank (1F1B, GPipe)"
        raise InvalidSetting("parallelism.pipeline_parallel_degree", pp, why, allowed)
