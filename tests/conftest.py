"""Before any test imports torchtitan: `recipes` chooses the device that torchtitan will use."""

import recipes  # noqa: F401
