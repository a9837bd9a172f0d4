"""LLaMA-3 with striped context parallelism, torchtitan's train spec "llama3_striped"."""
