"""Train a model.

torchrun --nproc_per_node N train.py --job.config_file X.toml [--section.key value ...]
"""

import sys

from recipes.process import signals

if __name__ == "__main__":
    # Before the imports below: a scheduler may ask the run to leave at any time.
    signals.listen()
    from recipes.launch import main

    main(sys.argv[1:])
