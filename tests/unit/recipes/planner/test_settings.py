"""From TOML sections to the planner's run, and back."""

from dataclasses import replace

import pytest

from recipes.models.llama3 import LLAMA3
from recipes.planner.balance import compare_layouts, slowest_pairs, with_counted_pairs
from recipes.planner.hardware import GPUS, find_network_gb_s
from recipes.planner.report import toml_text
from recipes.planner.run import Levers, Run
from recipes.planner.search import search
from recipes.planner.settings import run_from_config, run_to_search, settings_of
from recipes.planner.step_time import plan_time, tile_pairs
from recipes.preflight import load_config
from striped_cp.layout import Contiguous, HeadTail, Striped

H100 = GPUS["h100"]
IB = find_network_gb_s("ib400")


def planned(*overrides: str, gpus: int = 16) -> Run:
    base = (
        "--model.flavor",
        "8B",
        "--training.seq_len",
        "131072",
        "--training.local_batch_size",
        "1",
    )
    return run_from_config(load_config([*base, *overrides]), gpus, H100)


def test_every_setting_arrives():
    run = planned(
        *("--parallelism.context_parallel_degree", "2"),
        *("--parallelism.tensor_parallel_degree", "2"),
        *("--parallelism.data_parallel_replicate_degree", "2"),
        *("--parallelism.context_parallel_load_balancer", "headtail"),
        *("--training.global_batch_size", "8"),
        *("--training.dtype", "bfloat16"),
        *("--striped_cp.rotate_method", "allgather"),
        *("--striped_cp.kernel", "cudnn"),
        *("--activation_checkpoint.mode", "full"),
        *("--memory.mlp_chunk_tokens", "4096"),
        *("--memory.loss_chunk_tokens", "0"),
        "--memory.recompute_attention",
    )
    assert run == Run(
        LLAMA3.flavors["8B"],
        131072,
        local_batch=1,
        gradient_accumulation=2,
        dp_replicate=2,
        dp_shard=2,
        cp=2,
        tp=2,
        levers=Levers("full", True, False, 0, 4096),
        kernel="cudnn",
        rotate_method="allgather",
        layout="headtail",
        parameter_bytes=2,
    )


@pytest.mark.parametrize(
    ("overrides", "kernel"),
    [
        ((), "flash"),
        (("--documents.no-mask",), "cudnn"),
        (("--documents.no-mask", "--parallelism.context_parallel_degree", "2"), "cudnn"),
        (("--documents.no-mask", "--striped_cp.kernel", "fa3"), "fa3"),
    ],
)
def test_auto_kernel(overrides, kernel):
    assert planned(*overrides).kernel == kernel


@pytest.mark.parametrize(
    ("overrides", "checkpointing"),
    [
        (("--activation_checkpoint.mode", "none"), "none"),
        (("--activation_checkpoint.mode", "selective"), "every_2"),
        (
            (
                *("--activation_checkpoint.mode", "selective"),
                *("--activation_checkpoint.selective_ac_option", "op"),
            ),
            "selective",
        ),
    ],
)
def test_activation_checkpointing(overrides, checkpointing):
    assert planned(*overrides).levers.checkpointing == checkpointing


PIPELINE = (
    *("--parallelism.pipeline_parallel_degree", "4"),
    *("--training.local_batch_size", "8"),
)


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        ((), 1),
        (("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"), 2),
        (("--parallelism.pipeline_parallel_schedule", "LoopedBFS"), 2),
        (
            (
                *("--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"),
                *("--parallelism.pipeline_parallel_layers_per_stage", "3"),
            ),
            3,
        ),
    ],
)
def test_pipeline_stages(overrides, stages):
    # 32 layers, and one each for embedding and output projection.
    run = planned(*PIPELINE, *overrides)
    assert (run.virtual_stages, run.microbatches, run.dp_shard) == (stages, 8, 4)


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "LoopedBFS"])
def test_fewer_microbatches_than_ranks_are_planned_where_training_takes_them(schedule):
    few = ("--training.local_batch_size", "2")
    run = planned(*PIPELINE, *few, "--parallelism.pipeline_parallel_schedule", schedule)
    assert run.microbatches == 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--training.enable_cpu_offload",), "enable_cpu_offload = true: the planner does not"),
        (
            (
                *PIPELINE,
                *("--activation_checkpoint.mode", "none"),
                *("--parallelism.pipeline_parallel_schedule", "ZBVZeroBubble"),
            ),
            'schedule = "ZBVZeroBubble": the planner knows 1F1B, GPipe, Interleaved1F1B, LoopedBFS',
        ),
        (
            (*PIPELINE, "--parallelism.pipeline_parallel_layers_per_stage", "5"),
            "layers_per_stage = 5: makes 7 stages",
        ),
        (("--training.global_batch_size", "17"), "global_batch_size = 17: not a multiple of"),
    ],
)
def test_what_is_not_planned_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        planned(*overrides)


def test_settings_written_by_a_search_are_read_back():
    (best, *_) = search(planned("--documents.no-mask"), 1, H100, IB, ("flash", "cudnn"))
    overrides = [
        part
        for section, values in settings_of(best.run).items()
        for key, value in values.items()
        for part in (
            [f"--{section}.{key}", str(value)]
            if not isinstance(value, bool)
            else [f"--{section}.{'' if value else 'no-'}{key}"]
        )
    ]
    assert planned("--documents.no-mask", *overrides) == best.run


def test_search_keeps_the_tokens_of_a_step():
    run = planned()
    plans = search(run, 16, H100, IB, ("flash",))
    assert {plan.run.tokens_per_step for plan in plans} == {16 * 131072}


@pytest.mark.parametrize("gpus", [64, 96])
def test_search_starts_from_the_gpus_not_from_the_mesh_of_the_file(gpus):
    """The recipe's own mesh needs a multiple of 128."""
    config = load_config(["--job.config_file", "train_configs/llama3_70b_512k.toml"])
    with pytest.raises(ValueError, match="= 128 does not divide"):
        run_from_config(config, gpus, H100)
    run, sequences = run_to_search(config, gpus, H100)
    plans = search(run, sequences, H100, IB, ("flash",))
    assert {plan.run.gpus for plan in plans} == {gpus}
    assert all(plan.comfortable for plan in plans)
    assert gpus == 96 or any((plan.run.cp, plan.run.tp) == (8, 8) for plan in plans)


def test_toml_text():
    table = {"job": {"name": 'a "b"', "list": [1, 2]}, "quantize": {"linear": {"on": True}}}
    assert toml_text(table, "made by a test") == (
        '# made by a test\n\n[job]\nname = "a \\"b\\""\nlist = [1, 2]\n\n'
        "[quantize.linear]\non = true\n"
    )


@pytest.mark.parametrize("layout", [Striped(), HeadTail(), Contiguous()], ids=lambda x: x.spec)
def test_closed_forms_agree_with_the_tiles(layout):
    run = Run(LLAMA3.flavors["8B"], 8192, cp=4, layout=layout.spec.partition(":")[0])
    assert tile_pairs(run) == pytest.approx(slowest_pairs(layout, run)[0][None], rel=1e-3)


def with_windows(*windows: int | None) -> Run:
    shape = replace(LLAMA3.flavors["8B"], windows=windows)
    return Run(shape, 131072, cp=8, rotate_method="ring")


def test_windowed_layers_are_counted_and_averaged():
    run = with_counted_pairs(with_windows(4096, None))
    full, band = 131072 * 131073 / 2, 4096 * 4097 / 2 + (131072 - 4096) * 4096
    assert run.pairs == (full + band) / 2
    assert sum(tile_pairs(run)) == sum(tile_pairs(with_windows(None)))
    assert sum(tile_pairs(run, 4096)) * 8 == pytest.approx(band, rel=1e-3)
    contiguous = with_counted_pairs(replace(run, layout="contiguous"))
    assert [len(tile_pairs(contiguous, w)) for w in (4096, None)] == [2, 8]
    plain = plan_time(with_windows(None), H100, IB)
    windowed = plan_time(run, H100, IB)
    # Blocks of 128 rows on one edge of a triangle, and on both of a band of 4096 / 8 rows.
    share = (band * (1 + 128 / 512) / (full * (1 + 128 / 16384)) + 1) / 2
    seconds = [plan.parts["attention kernels"] for plan in (plain, windowed)]
    assert seconds[1] == pytest.approx(share * seconds[0], rel=5e-3)
    # torchtitan counts the full square in either, "causal" what a step does.
    square, causal = (
        [getattr(plan, name) * plan.step_seconds for plan in (plain, windowed)]
        for name in ("mfu_torchtitan", "mfu_causal")
    )
    assert square[1] == pytest.approx(square[0])
    linear, per_pair = 6 * 7_504_924_672 * 131072, 12 * 32 * 4096
    work = [linear + per_pair * pairs for pairs in (full, run.pairs)]
    assert causal[1] / causal[0] == pytest.approx(work[1] / work[0])


def test_the_layout_for_a_model_with_windows():
    def fastest(run: Run) -> tuple[str, list[str]]:
        rows = compare_layouts(run, H100, IB)
        best = max(rows, key=lambda row: row.plan.time.tokens_per_second_per_gpu)
        return best.name, [row.name for row in rows]

    assert fastest(with_windows(1024)) == (
        "contiguous",
        ["contiguous", "headtail", "stripes of 1"],
    )
    assert fastest(with_windows(1024, None))[0] == "stripes of 1"
    assert "stripes of 128" in fastest(with_windows(None))[1]


def test_documents_save_attention_time():
    whole = Run(LLAMA3.flavors["8B"], 8192, cp=4)
    packed = with_counted_pairs(Run(LLAMA3.flavors["8B"], 8192, cp=4, documents=(4096, 4096)))
    seconds = [plan_time(run, H100, IB).parts["attention kernels"] for run in (whole, packed)]
    # Half the pairs, and the rates of variable-length calls: forward 2 parts of 7, backward 5.
    rate = H100.kernels["flash"]
    assert rate.packed == (345, 263)
    dense = 2 / rate.forward + 5 / rate.backward
    assert seconds[1] == pytest.approx(seconds[0] / 2 * (2 / 345 + 5 / 263) / dense, rel=2e-3)


def test_replication_costs_an_all_reduce():
    one_node = Run(LLAMA3.flavors["8B"], 8192, dp_shard=8)
    eight_nodes = Run(LLAMA3.flavors["8B"], 8192, dp_shard=8, dp_replicate=8)
    exposed = [plan_time(run, H100, IB).parts["exposed FSDP"] for run in (one_node, eight_nodes)]
    assert exposed[1] > exposed[0]
