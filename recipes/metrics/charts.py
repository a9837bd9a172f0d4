"""How TensorBoard groups the charts: its tab "Custom Scalars", measured beside planned."""

import re
from collections.abc import Sequence

# group -> chart -> tags; a tag that ends in "/" stands for all that begin with it.
_CHARTS: dict[str, dict[str, tuple[str, ...]]] = {
    "Loss": {
        "loss": (
            "loss_metrics/global_avg_loss",
            "loss_metrics/global_max_loss",
            "validation_metrics/loss",
        ),
        "loss by position": ("loss_by_position/",),
        "validation loss by position": ("validation_loss_by_position/",),
        "share of tokens by position": ("token_share_by_position/",),
    },
    "Speed": {
        "tokens per second and rank": ("throughput(tps)", "planned/throughput(tps)"),
        "MFU": ("mfu(%)", "mfu_causal(%)", "planned/mfu(%)", "planned/mfu_causal(%)"),
        "seconds per step": ("time_metrics/end_to_end(s)", "planned/end_to_end(s)"),
        "hours left": ("time_metrics/left(h)",),
        "share of time in data loading": ("time_metrics/data_loading(%)",),
    },
    "Ring": {
        "imbalance: slowest rank over mean": ("ring/imbalance",),
        "seconds in attention and waiting": (
            "ring/attention(s)",
            "ring/attention_slowest(s)",
            "ring/wait(s)",
            "ring/wait_least(s)",
        ),
        "sent per rank and step": ("ring/sent(MB)",),
    },
    "Memory": {
        "peak": ("memory/max_reserved(GiB)", "planned/max_reserved(GiB)"),
        "trouble": ("memory/num_alloc_retries", "memory/num_ooms"),
    },
    "Optimizer": {"learning rate": ("lr",), "gradient norm": ("grad_norm",)},
    "Data": {
        "tokens seen": ("n_tokens_seen",),
        "documents per sequence": ("data/documents_per_sequence",),
        "longest document": ("data/longest_document",),
        "padding": ("data/padding(%)",),
        "epoch": ("data/epoch",),
    },
}


def custom_scalars(
    validation: bool, ring: bool, sources: Sequence[str] = ()
) -> dict[str, dict[str, list]]:
    """The layout as `SummaryWriter.add_custom_scalars` takes it.

    Args:
        validation, ring: whether the run has either; without, no chart is empty.
        sources: names of the sources of a mixture.
    """
    absent = (() if validation else ("validation",)) + (() if ring else ("ring/",))
    by_source = {
        f"{what} by source": tuple(f"data/{name}/{what}" for name in sources)
        for what in ("tokens", "epoch")
    }
    groups = {
        group: {
            chart: ["Multiline", [_pattern(tag) for tag in shown]]
            for chart, tags in charts.items()
            if (shown := [tag for tag in tags if not tag.startswith(absent)])
        }
        for group, charts in (_CHARTS | {"Data": _CHARTS["Data"] | by_source}).items()
    }
    return {group: charts for group, charts in groups.items() if charts}


def twins(metrics: dict[str, float]) -> dict[str, float]:
    """The values of charts whose tags have parentheses, under tags that have none.

    TensorBoard 2.21 looks for the run's name behind a tag's first parenthesis and draws nothing.
    """
    return {_drawable(tag): metrics[tag] for tag in metrics if tag in _UNDRAWABLE}


_UNDRAWABLE = {
    tag for charts in _CHARTS.values() for tags in charts.values() for tag in tags if "(" in tag
}


def _drawable(tag: str) -> str:
    return "charts/" + tag.replace("(", "_").replace(")", "") if "(" in tag else tag


def _pattern(tag: str) -> str:
    """TensorBoard reads tags as regular expressions that match from the start."""
    return re.escape(tag) if tag.endswith("/") else f"{re.escape(_drawable(tag))}$"
