"""The LLaMA-3 train spec, data, memory levers and metrics built on torchtitan 0.2.2 and striped_cp."""
