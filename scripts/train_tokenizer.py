"""Train the small byte-level BPE tokenizer of the sample corpus.

    python scripts/train_tokenizer.py

writes `assets/tokenizer/`, which is committed; run it only to change the tokenizer.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from arguments import positive
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.data.files import find_files
from recipes.data.readers import read_records

ASSETS = Path(__file__).resolve().parent.parent / "assets"
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"  # LLaMA-3's names


def texts(corpus: str) -> Iterator[str]:
    """Documents of what prepare_documents.py reads."""
    for file in find_files(corpus).files:
        for record in read_records(file, "text"):
            yield record.text()


def train(corpus: str, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus), trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--corpus",
        default=str(ASSETS / "corpus" / "austen.jsonl.gz"),
        help="a file, a folder or a glob, as for prepare_documents.py",
    )
    parser.add_argument("--vocab-size", type=positive, default=2048, help="special tokens included")
    parser.add_argument("--output", type=Path, default=ASSETS / "tokenizer", help="folder")
    args = parser.parse_args()

    try:
        tokenizer = train(args.corpus, args.vocab_size)
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {error.filename or args.output}: {error.strerror}")
    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    text = json.dumps(config, indent=2) + "\n"
    (args.output / "tokenizer_config.json").write_text(text, encoding="utf-8")
    print(f"{args.output}: {tokenizer.get_vocab_size()} entries")


if __name__ == "__main__":
    main()
