"""How many ranks should share heads? The planner's table, 8B and 70B on H100s.

    PYTHONPATH=. python docs/experiments/ulysses_degrees.py

Tokens/s/GPU of one sequence over all GPUs (cp = GPUs, tp 1), full activation checkpointing that
keeps attention's output, FlashAttention-2, by the ranks of a node that share heads: one document of
the whole length, and packed documents of 16,384 tokens. 400 Gb/s between nodes. Memory is not asked
for. docs/reference/performance.md has the table.
"""

from dataclasses import replace

from recipes.models.llama3 import LLAMA3
from recipes.planner.balance import with_counted_pairs
from recipes.planner.hardware import GPUS, find_network_gb_s
from recipes.planner.run import Run
from recipes.planner.step_time import plan_time

LENGTHS = {"128K": 2**17, "256K": 2**18, "1M": 2**20}
DOCUMENT = 2**14
LEAST_TOKENS = 2048  # of a rank
H100, NETWORK = GPUS["h100"], find_network_gb_s("ib400")


def speed(run: Run) -> str:
    return f"{plan_time(with_counted_pairs(run), H100, NETWORK).tokens_per_second_per_gpu:.0f}"


print("| model | tokens | GPUs | one document: 1 | 2 | 4 | 8 | packed: 1 | 2 | 4 | 8 |")
print("|---|---|---|---|---|---|---|---|---|---|---|")
for size in ("8B", "70B"):
    for name, seq_len in LENGTHS.items():
        for gpus in (8, 16, 32, 64, 128, 256, 512):
            if seq_len // gpus < LEAST_TOKENS:
                continue
            plain = Run(LLAMA3.flavors[size], seq_len, cp=gpus, kernel="flash")
            packed = replace(plain, documents=(DOCUMENT,) * (seq_len // DOCUMENT))
            cells = [
                speed(replace(run, ulysses=degree))
                for run in (plain, packed)
                for degree in (1, 2, 4, 8)
            ]
            print(f"| {size} | {name} | {gpus} | {' | '.join(cells)} |")
