"""Each memory lever alone and all together: the loss and gradients of the plain model on one rank.

The plain model has whole logits, no checkpointing and no chunks. Tolerance 1e-5, float32.
"""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.launch import run_ranks
from tests.helpers.model_step import Step, compare_step, save_step
from tests.helpers.training import CP, PP, TP

PLAIN = ["--memory.loss_chunk_tokens", "0", "--activation_checkpoint.mode", "none"]
FULL = ["--activation_checkpoint.mode", "full"]
LEVERS = {
    "none": [],
    "loss": ["--memory.loss_chunk_tokens", "24"],
    "mlp": ["--memory.mlp_chunk_tokens", "24"],
    "checkpoints": FULL,
    "recompute attention": [*FULL, "--memory.recompute_attention"],
    "offload": [*FULL, "--memory.offload_checkpoints"],
    "all": [
        *FULL,
        "--memory.offload_checkpoints",
        *["--memory.loss_chunk_tokens", "24", "--memory.mlp_chunk_tokens", "24"],
    ],
}
COMPILED = [
    *FULL,
    *["--memory.loss_chunk_tokens", "24", "--memory.mlp_chunk_tokens", "24"],
    *["--compile.enable", "--compile.backend", "aot_eager"],
]
LAYOUTS = {
    "cp1": (1, [CP, "1"]),
    "cp2": (2, [CP, "2"]),
    "cp4": (4, [CP, "4"]),
    "tp2": (2, [CP, "1", TP, "2"]),
    "cp2 tp2": (4, [CP, "2", TP, "2"]),
    "pp2": (2, [CP, "1", PP, "2"]),
    "cp2 pp2": (4, [CP, "2", PP, "2"]),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("plain") / "step.pt")
    run_ranks(1, save_step, path, *PLAIN, CP, "1")
    return path


def compare_all(path, overrides, names):
    settings = LEVERS | {"compiled": COMPILED}
    return {name: compare_step(path, *overrides, *PLAIN, *settings[name]) for name in names}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradients(layout, plain):
    world_size, overrides = LAYOUTS[layout]
    # Under two kinds of parallelism at once: nothing and everything.
    names = [*LEVERS] if " " not in layout else ["none", "all"]
    if layout == "cp2":
        names.append("compiled")
    for errors in run_ranks(world_size, compare_all, plain, overrides, names):
        for name, error in errors.items():
            assert error["loss"] < 1e-5, (name, error)
            assert error["gradients"] < 1e-5, (name, error)


def bitwise_differences(names):
    """Whether loss or gradients differ from no checkpointing, under FSDP's bfloat16."""
    settings = [CP, str(dist.get_world_size()), "--training.mixed_precision_param", "bfloat16"]
    plain = Step(*settings, *PLAIN)
    loss, gradients = plain.run(), plain.gradients()
    differences = []
    for name in names:
        step = Step(*settings, *PLAIN, *LEVERS[name])
        differences += [(name, "loss")] if not torch.equal(step.run(), loss) else []
        differences += [
            (name, parameter)
            for parameter, gradient in step.gradients().items()
            if not torch.equal(gradient, gradients[parameter])
        ]
    return differences


def test_recomputation_in_mixed_precision():
    """A block computed again gets the same numbers in the same dtype: bitwise the same step."""
    names = ["checkpoints", "recompute attention", "offload"]
    assert run_ranks(2, bitwise_differences, names) == [[], []]
