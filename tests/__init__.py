"""Tests: `unit` mirrors the tree, `distributed` has gloo ranks, `integration` commands."""

from pathlib import Path

import recipes  # noqa: F401  (before torchtitan, for which it prepares the host)

ROOT = Path(__file__).parents[1]
