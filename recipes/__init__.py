"""Training recipes: the layer between torchtitan and `striped_cp`."""

from recipes.titan import first_import

first_import.prepare()
