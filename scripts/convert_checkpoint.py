"""Write the weights of any step of a run as a folder that `transformers` loads.

    python scripts/convert_checkpoint.py X.toml outputs/X/checkpoint/step-20 my_model
    python scripts/convert_checkpoint.py X.toml STEP_FOLDER my_model --dtype float32

X.toml is the recipe of the run: its flavor, RoPE settings, sequence length and tokenizer go into
the folder. `--section.key value` overrides it, as for train.py. One process, no GPU; the memory of
one file, 5 GB in bfloat16. docs/reference/weights.md says what is written.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(argv: list[str]) -> int:
    args, overrides = parser().parse_known_args(argv)
    sys.path.insert(0, str(ROOT))
    # After the arguments: these imports take seconds.
    from recipes.preflight import load_config
    from recipes.preflight.weights import take_rope
    from recipes.weights.export import convert_checkpoint

    try:
        config = load_config(["--job.config_file", args.config, *overrides])
        take_rope(config)
        convert_checkpoint(args.checkpoint, args.folder, config, args.dtype)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{args.folder}: transformers.AutoModelForCausalLM.from_pretrained loads it")
    return 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="A checkpoint of a run to a Hugging Face folder.",
        epilog="--section.key value overrides the TOML, as for train.py.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="TOML file of the run")
    parser.add_argument("checkpoint", type=Path, help="folder of one step")
    parser.add_argument("folder", type=Path, help="where to write")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="of the weights")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
