"""What the library brings with it."""

import subprocess
import sys


def test_the_library_needs_torch_alone() -> None:
    code = (
        "import sys, striped_cp; "
        "print([m for m in ('transformers', 'torchtitan', 'recipes') if m in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "[]"
