"""The features of a run that must work together, and the runs in which every pair of them does.

A new capability joins as one line of FEATURES. A pair that startup refuses is a line of REFUSED.
"""

from itertools import combinations, product

import covertable

from tests.helpers.models import name_settings

Settings = tuple[str, ...]

CP, TP, PP = (f"--parallelism.{name}_parallel_degree" for name in ("context", "tensor", "pipeline"))
DP = "--parallelism.data_parallel_shard_degree"
# Ranks, and the settings that lay them out.
RANKS: dict[str, tuple[int, Settings]] = {
    "1": (1, (CP, "1")),
    "cp2": (2, (CP, "2")),
    "dp2": (2, (CP, "1", DP, "2")),
    "cp2 dp2": (4, (CP, "2", DP, "2")),
    "cp4 = 2 x 2": (4, (CP, "4", "--striped_cp.ulysses_degree", "2")),
    "cp2 tp2": (4, (CP, "2", TP, "2")),
    "cp2 pp2": (4, (CP, "2", PP, "2")),
}
# By feature and value. A test makes "{hf}" (of the row's model) and the
# files of "data".
FEATURES: dict[str, dict[str, Settings]] = {
    "ranks": {name: settings for name, (_, settings) in RANKS.items()},
    "model": {
        "llama3": name_settings(),
        "qwen2 tied": name_settings("qwen2_striped", tied=True),
        "qwen3": name_settings("qwen3_striped"),
    },
    "packing": {"pack": (), "concat": ("--documents.packing", "concat")},
    "mask": {"on": (), "off": ("--documents.no-mask",)},
    "checkpointing": {
        name: ("--activation_checkpoint.mode", name) for name in ("none", "full", "selective")
    },
    "compile": {"off": (), "on": ("--compile.enable", "--compile.components", "model")},
    "bfloat16": {"off": (), "on": ("--training.mixed_precision_param", "bfloat16")},
    "offload": {"off": (), "on": ("--memory.offload_checkpoints",)},
    "loss chunks": {n: ("--memory.loss_chunk_tokens", n) for n in ("0", "32")},
    "MLP chunks": {n: ("--memory.mlp_chunk_tokens", n) for n in ("0", "32")},
    "validation": {
        "off": (),
        "on": ("--validation.enable", "--validation.freq", "2", "--validation.steps", "1"),
    },
    "evaluation": {
        "off": (),
        "on": (
            *("--evaluation.enable", "--evaluation.freq", "2", "--evaluation.lengths", "160"),
            *("--evaluation.tasks", "passkey", "--evaluation.samples", "1"),
            *("--evaluation.depths", "0.5", "--evaluation.texts", "1"),
        ),
    },
    "saving": {"at once": (), "async": ("--checkpoint.async_mode", "async")},
    "start": {
        "random": (),
        "Hugging Face": ("--checkpoint.initial_load_in_hf", "--model.hf_assets_path", "{hf}"),
    },
    "last save": {
        "to go on": ("--checkpoint.no-last-save-model-only",),
        "Hugging Face": ("--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"),
    },
    "accumulation": {"off": (), "on": ("--training.global_batch_size", "8")},
    "float8": {
        "off": (),
        "on": ("--model.converters", "quantize.linear.float8", "--quantize.linear.float8.emulate"),
    },
    "profiling": {
        "off": (),
        "on": (
            *("--profiling.enable_profiling", "--profiling.profile_freq", "2"),
            *("--profiling.profiler_warmup", "1", "--profiling.profiler_active", "1"),
        ),
    },
    "data": {
        "sample": (),
        "files": ("--training.dataset", "local", "--training.dataset_path", "{jsonl}"),
        "prepared": ("--training.dataset", "local", "--training.dataset_path", "{prepared}"),
        "mixture": ("--job.config_file", "{mixture}"),
        "token ids": (
            *("--training.dataset", "local", "--training.dataset_path", "{ids}"),
            *("--training.text_column", "input_ids"),
        ),
        "conversations": (
            *("--training.dataset", "local", "--training.dataset_path", "{chats}"),
            *("--training.text_column", "messages", "--documents.loss_on", "assistant"),
        ),
    },
}
Pair = frozenset[tuple[str, str]]
# What one says of the other stands in docs/reference/parallelism.md and memory.md beside it.
REFUSED: set[Pair] = {
    frozenset({("offload", "on"), ("checkpointing", "none")}),
    frozenset({("offload", "on"), ("compile", "on")}),
    frozenset({("float8", "on"), ("compile", "on")}),
    frozenset({("evaluation", "on"), ("ranks", "cp2 pp2")}),
    frozenset({("model", "qwen2 tied"), ("ranks", "cp2 pp2")}),
}

Row = dict[str, str]


def every_pair() -> list[Pair]:
    names = list(FEATURES)
    return [
        frozenset({(a, x), (b, y)})
        for a, b in combinations(names, 2)
        for x, y in product(FEATURES[a], FEATURES[b])
    ]


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def settings_of(row: Row) -> list[str]:
    return [word for name, value in row.items() for word in FEATURES[name][value]]


def covering_rows() -> list[Row]:
    """Rows that together have every pair which is not refused, and no other."""
    constraints = [
        {
            "operator": "or",
            "conditions": [
                {"operator": "ne", "left": name, "value": value} for name, value in pair
            ],
        }
        for pair in REFUSED
    ]
    factors = {name: list(values) for name, values in FEATURES.items()}
    rows = covertable.make(factors, constraints=constraints)
    return sorted((dict(row) for row in rows), key=lambda row: list(row.values()))
