"""Print the first sequences of a run as its model will see them.

    python scripts/inspect_data.py train_configs/debug_cpu_packed.toml
    python scripts/inspect_data.py X.toml --sequences 20 --png lengths.png

Documents with their borders, decoded at both ends, [[ what does not count in the loss ]]; padding;
what every source of a mixture gave; and how long the documents are. The sequences are those of the
only rank of a run without data parallelism. The TOML is read as training reads it;
`--section.key value` overrides it likewise.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    args, overrides = parser().parse_known_args(argv)
    sys.path.insert(0, str(ROOT))
    try:
        inspect(args, overrides)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def parser() -> argparse.ArgumentParser:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("--sequences", type=int, default=4, help="how many to print")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the lengths of documents")
    return parser


def inspect(args: argparse.Namespace, overrides: list[str]) -> None:
    """Print, and draw.

    Raises:
        ValueError: one line for a setting or a document that cannot be used.
    """
    if args.sequences < 1:
        raise ValueError(f"--sequences {args.sequences}: at least 1")
    # After the arguments: these imports take seconds.
    from recipes.data.dataset import build_dataloader
    from recipes.data.inspection import document_lengths, lengths_text, sequences_text
    from recipes.data.tokens import build_tokenizer
    from recipes.preflight import load_config
    from recipes.preflight.data import check_data

    config = load_config(["--job.config_file", args.config, *overrides])
    config.training.local_batch_size = 1
    config.training.dataloader.num_workers = 0  # nothing is read ahead of what is shown
    config.checkpoint.enable = config.validation.enable = config.evaluation.enable = False
    check_data(config, dp_degree=1)
    tokenizer = build_tokenizer(config)
    loader = build_dataloader(1, 0, tokenizer, config)
    for text in sequences_text(loader, tokenizer, args.sequences):
        print(text, end="\n\n")
    drawn = {}
    for member in loader.members:
        lengths, which = document_lengths(member, tokenizer)
        print(lengths_text(member.name, lengths, which), end="\n\n")
        if len(lengths):
            drawn[member.name] = lengths
    if args.png and drawn:
        draw(args.png, drawn, loader.seq_len)
        print(f"wrote {args.png}")


def draw(path: Path, lengths: dict[str, np.ndarray], seq_len: int) -> None:
    """Share of documents and of tokens by length, a line for every source."""
    import matplotlib

    matplotlib.use("agg")
    import numpy as np
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, constrained_layout=True)
    every = np.concatenate(list(lengths.values()))
    least, most = int(every.min()).bit_length() - 1, int(every.max()).bit_length()
    edges = 2.0 ** np.arange(least, most + 1)
    for panel, what in zip(panels, ("documents", "tokens"), strict=True):
        for name, one in lengths.items():
            weights = one if what == "tokens" else np.ones(len(one))
            counts, _ = np.histogram(one, edges, weights=weights)
            panel.stairs(100 * counts / counts.sum(), edges, label=name)
        panel.axvline(seq_len, color="grey", linestyle=":", label="training.seq_len")
        panel.set_xscale("log", base=2)
        panel.set_xlabel("length of a document (tokens)")
        panel.set_ylabel(f"share of {what} (%)")
        panel.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"--png {path}: {error.strerror}") from None
    pyplot.close(figure)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when a pager does
    sys.exit(main(sys.argv[1:]))
