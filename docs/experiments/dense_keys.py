r"""What keys and values laid out densely give the CPU kernel: its time with strided ones over that.

    OMP_NUM_THREADS=1 python docs/experiments/dense_keys.py

8 heads, 2 KV heads, D = 64, forward and backward, thread time, medians of 7 ratios.
docs/reference/performance.md has what it printed.
"""

import statistics
import time

import torch

from striped_cp.kernels import cpu
from striped_cp.kernels.base import BackwardInputs, Inputs

dense, strided = cpu._dense_keys, lambda x: {}
kernel = cpu.CpuKernel()
torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16):
    for rows in (4096, 8192):
        q, k, v, g = (torch.randn(1, rows, h, 64).to(dtype).transpose(1, 2) for h in (8, 2, 2, 8))
        ratios = []
        for _ in range(7):
            times = []
            for keys in (dense, strided):
                cpu._dense_keys = keys
                begin = time.thread_time()
                out, lse = kernel.attend(Inputs(q, k, v), True, 0.125)
                kernel.attend_backward(BackwardInputs(q, k, v, out, lse, g), True, 0.125)
                times.append(time.thread_time() - begin)
            ratios.append(times[1] / times[0])
        print(str(dtype)[6:], rows, round(statistics.median(ratios), 3))
