"""Tokenize text or conversations once, for training that reads them without tokenizing.

    python scripts/prepare_documents.py data/*.jsonl.gz --output prepared/books
    torchrun ... --training.dataset local --training.dataset_path prepared/books

    python scripts/prepare_documents.py chats.jsonl --output prepared/chats \\
        --text-column messages --loss-on assistant --tokenizer assets/hf/Llama-3.1-8B-Instruct
    torchrun ... --training.dataset_path prepared/chats --documents.loss_on assistant

Every text file, line or row is one document; a column of messages is a conversation, a column of
token ids is taken as it is. The output is a folder of memory-mapped Arrow files and a manifest. A
preparation that was interrupted goes on when the same command is given again; only a folder with a
manifest is finished, and training refuses any other.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from arguments import positive

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.data.readers import SUFFIXES
from recipes.data.records import BadDocument

if TYPE_CHECKING:
    from recipes.data.prepare import Result

_SHOWN_BAD = 20


def parse_args(args: list[str] | None = None) -> argparse.Namespace:
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("inputs", nargs="+", help=f"files, folders or globs of {', '.join(SUFFIXES)}")
    add("--output", required=True, type=Path, help="folder to write; new, or interrupted before")
    add("--tokenizer", default="assets/tokenizer", help="folder of the model's tokenizer")
    add(
        "--text-column",
        default="text",
        help="JSON key or column that holds text, messages (or prompt, beside completion), or ids",
    )
    add(
        "--loss-on",
        choices=["all", "assistant", "last"],
        default="all",
        help="messages of a conversation that are learned: all, the assistant's, or its last one",
    )
    add("--workers", type=positive, default=os.cpu_count(), help="processes that tokenize")
    add("--shard-tokens", type=positive, default=1 << 26, help="tokens per file, about")
    add(
        "--seq-len",
        type=positive,
        nargs="+",
        default=[8192, 32768, 131072, 524288, 1048576],
        help="sequence lengths for which the summary says how well the documents pack",
    )
    add(
        "--skip-bad",
        action="store_true",
        help="leave out and count documents that are empty or cannot be read, instead of stopping",
    )
    add("--overwrite", action="store_true", help="remove an earlier preparation in --output first")
    return parser.parse_args(args)


def main() -> None:
    args = parse_args()
    try:
        run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(
            f"interrupted; the same command goes on after the last whole shard in {args.output}"
        )


def run(args: argparse.Namespace) -> None:
    # Imported late, here and below: --help is not to wait for them.
    from recipes.data.prepare import Settings, clear, prepare

    settings = Settings(
        files=_input_files(args.inputs),
        text_column=args.text_column,
        tokenizer_path=args.tokenizer,
        shard_tokens=args.shard_tokens,
        skip_bad=args.skip_bad,
        loss_on=args.loss_on,
    )
    if args.overwrite:
        clear(args.output)
    with closing(_Progress(settings.files, settings.skip_bad)) as progress:
        manifest = prepare(settings, args.output, args.workers, progress.update)
    print_summary(args.output, args.seq_len)
    if manifest["bad_documents"]:
        print(f"left out: {manifest['bad_documents']} bad documents")


def _input_files(inputs: list[str]) -> list[Path]:
    from recipes.data.files import find_files

    try:
        found = find_files(inputs)
    except ValueError as error:
        raise ValueError(f"{error}; allowed: {', '.join(SUFFIXES)}") from None
    if found.left_out:
        print(found.told(), file=sys.stderr)
    return found.files


class _Progress:
    """A bar over the bytes of the input, with counts of documents and tokens."""

    def __init__(self, files: list[Path], skip_bad: bool) -> None:
        from tqdm import tqdm

        sizes = [file.stat().st_size for file in files]
        self._before = [0, *np.cumsum(sizes).tolist()]
        self._bar = tqdm(total=self._before[-1], unit="B", unit_scale=True, mininterval=0.5)
        self._documents = self._tokens = self._bad = 0
        self._skip_bad = skip_bad  # without it the first one ends the preparation, and is told then

    def close(self) -> None:
        self._bar.close()

    def update(self, document: Result) -> None:
        (file, _), offset, result = document
        self._bar.update(self._before[file] + offset - self._bar.n)
        if isinstance(result, BadDocument):
            self._bad += 1
            if self._skip_bad and self._bad <= _SHOWN_BAD:
                more = " (further ones are only counted)" if self._bad == _SHOWN_BAD else ""
                self._bar.write(f"bad document: {result.place}: {result.cause}{more}", sys.stderr)
        else:
            self._documents += 1
            self._tokens += len(result)
        self._bar.set_postfix_str(f"{self._documents:,} documents, {self._tokens:,} tokens", False)


def print_summary(folder: Path, seq_lens: list[int]) -> None:
    """Print what the folder holds and how well it packs."""
    from recipes.data.shards import ShardFolder
    from recipes.data.statistics import length_histogram, packing_efficiency

    shards = ShardFolder(folder)
    lengths = shards.lengths()
    total = int(lengths.sum())
    print(f"{folder}: {len(lengths):,} documents, {total:,} tokens, {len(shards.files)} files")
    print(f"longest {lengths.max():,}, median {int(np.median(lengths)):,} tokens")
    if shards.manifest.get("loss_on"):
        learned = sum(shard["learned"] for shard in shards.manifest["shards"])
        print(f"loss on {shards.manifest['loss_on']}: {learned:,} tokens, {learned / total:.1%}")
    print("length in tokens            documents   share of tokens")
    for low, high, count in length_histogram(lengths):
        inside = lengths[(lengths >= low) & (lengths < high)].sum() / total
        print(f"{low:>11,} to {high - 1:>11,} {count:>11,} {inside:>16.1%}")
    print("   seq_len   filled   documents cut")
    for seq_len in seq_lens:
        filled, cut = packing_efficiency(lengths.tolist(), seq_len)
        print(f"{seq_len:>10,} {filled:>8.1%} {cut:>15.1%}")


if __name__ == "__main__":
    main()
