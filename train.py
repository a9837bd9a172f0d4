"""Train a model.

torchrun --nproc_per_node N train.py --job.config_file X.toml [--section.key value ...]
"""

import sys

from recipes.launch import main

if __name__ == "__main__":
    main(sys.argv[1:])
