"""The models: sizes, modules, parallelisms, names of weights."""
