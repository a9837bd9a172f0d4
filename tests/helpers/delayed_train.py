"""train.py, with DELAY_SECONDS on everything that rank DELAY_RANK sends to the next of its ring.

Stands in for a slow cable, where the kernel cannot shape the traffic of a network device.
"""

import os
import sys
import time

import torch.distributed as dist

from recipes.launch import main

_P2POp = dist.P2POp


def late(operation, tensor, peer=None, group=None, tag=0, group_peer=None):
    onwards = group_peer == (dist.get_rank(group) + 1) % dist.get_world_size(group)
    if operation is dist.isend and onwards:
        time.sleep(float(os.environ["DELAY_SECONDS"]))
    return _P2POp(operation, tensor, peer, group, tag, group_peer)


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ["DELAY_RANK"]:
        dist.P2POp = late
    main(sys.argv[1:])
