"""Tests: `unit` mirrors the tree, `distributed` has gloo ranks, `integration` commands."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
