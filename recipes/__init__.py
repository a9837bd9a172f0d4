"""Training recipes: the layer between torchtitan and `striped_cp`.

Importing any module of this package first prepares the host (`recipes.titan.cpu_host`), because
torchtitan decides on its device when it is imported for the first time.
"""

import os

# torchao 0.16 probes for CUDA libraries and reports each one that a CPU host lacks.
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")

from recipes.titan import cpu_host

cpu_host.install()
