"""Before any test imports torchtitan: `recipes` chooses the device that torchtitan will use."""

import torch

import recipes  # noqa: F401

# Tests run in parallel processes, and loopback rings in threads: one core each.
torch.set_num_threads(1)
