r"""This ring on the CPU beside others: time and errors, on two gloo ranks, taking turns.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 docs/experiments/peers.py \
        --seq-len 8192 --dtype float32

Causal attention, 8 heads, 2 KV heads, D = 64, forward and backward:

- this project's layouts;
- torch's ring for its head-tail layout (`torch.distributed.tensor.experimental`), called directly
  with the CPU operators: its public entry, context_parallel, has none for CPUs;
- ring-attention-pytorch, if it is installed, in float32: its backward pass on a CPU takes no other;
- torch's SDPA on the whole sequence: one rank with one thread, both ranks at once with one thread
  each, and one rank with two threads.

Times are medians of the slowest rank's wall time, and of the ratio to `striped` within a repeat;
errors the largest against float64 at S = 1,024. docs/reference/performance.md has the table.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

from striped_cp import Contiguous, HeadTail, Striped, ring_attention

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--seq-len", type=int, default=8192)
parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
parser.add_argument("--repeats", type=int, default=5)
options = parser.parse_args()

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
P = 2
MESH = init_device_mesh("cpu", (P,), mesh_dim_names=("cp",))
RANK = dist.get_rank()
aten = torch.ops.aten


class Whole:
    """SDPA on the whole sequence, on rank 0 or on both ranks at once."""

    def __init__(self, threads: int, ranks: int) -> None:
        self.threads, self.ranks = threads, ranks

    def positions(self, seq_len: int) -> Tensor:
        return torch.arange(seq_len)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Ours:
    threads, ranks = 1, P

    def __init__(self, layout: Striped | HeadTail | Contiguous) -> None:
        self.layout = layout

    def positions(self, seq_len: int) -> Tensor:
        return self.layout.positions(seq_len, P, RANK)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, mesh=MESH, layout=self.layout)


class TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch_cp._templated_ring_attention(
            MESH.get_group(),
            2,
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            query=q,
            key=k,
            value=v,
            is_causal=True,
            dropout_p=0.0,
            scale=None,
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        q, k, v, out, lse = ctx.saved_tensors
        return torch_cp._templated_ring_attention_backward(
            MESH.get_group(),
            2,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
            grad_out=grad_out,
            grad_out_name="grad_out",
            query=q,
            key=k,
            value=v,
            out=out,
            logsumexp=lse,
            is_causal=True,
            dropout_p=0.0,
            scale=None,
        )[:3]


class Torch(Ours):
    def __init__(self, rotate_method: str) -> None:
        super().__init__(HeadTail())
        self.rotate_method = torch_cp._RotateMethod[rotate_method]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch_cp._cp_options.enable_load_balance = True
        torch_cp._cp_options.rotate_method = self.rotate_method
        return TorchRing.apply(q, k, v)


class RingAttentionPytorch:
    """Striped, in buckets; it gives query head h the key head h modulo their number."""

    threads, ranks = 1, P

    def bucket(self, rows: int) -> int:
        return min(1024, rows)

    def positions(self, seq_len: int) -> Tensor:
        bucket = self.bucket(seq_len // P)
        return torch.arange(seq_len).view(bucket, -1).t().flatten().chunk(P)[RANK]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = ring_flash_attn(
            q,
            k,
            v,
            causal=True,
            bucket_size=self.bucket(q.shape[1]),
            ring_reduce_col=True,
            striped_ring_attn=True,
            ring_size=P,
        )
        return out.transpose(1, 2)


Contestant = Whole | Ours | RingAttentionPytorch
CONTESTANTS: dict[str, Contestant] = {
    "striped": Ours(Striped()),
    "headtail": Ours(HeadTail()),
    "contiguous": Ours(Contiguous()),
    "torch, head-tail, hops": Torch("ALL_TO_ALL"),
    "torch, head-tail, gathered": Torch("ALL_GATHER"),
    "SDPA, one thread": Whole(1, 1),
    "SDPA, one thread, twice": Whole(1, P),
    "SDPA, two threads": Whole(2, 1),
}
if options.dtype == "float32" and importlib.util.find_spec("ring_attention_pytorch"):
    CONTESTANTS["ring-attention-pytorch"] = RingAttentionPytorch()


def tensors(rows: int, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and the gradient of the output, (B, H, rows, D), in the order of a projection."""
    generator = torch.Generator().manual_seed(seed)
    heads = HEADS, KV_HEADS, KV_HEADS, HEADS
    return [
        torch.randn(1, rows, h, HEAD_DIM, generator=generator).to(dtype).transpose(1, 2)
        for h in heads
    ]


def run(attend: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def seconds(contestant: Contestant, local: list[Tensor], whole: list[Tensor]) -> float:
    dist.barrier()
    elapsed = 0.0
    if contestant.ranks > RANK:
        torch.set_num_threads(contestant.threads)
        started = time.perf_counter()
        run(contestant, whole if isinstance(contestant, Whole) else local)
        elapsed = time.perf_counter() - started
        torch.set_num_threads(1)
    slowest = torch.tensor(elapsed)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def exact(inputs: list[Tensor], kv_of_head: list[int]) -> list[Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, kv_of_head], v[:, kv_of_head], is_causal=True)

    return run(attend, [x.double() for x in inputs])


def errors(contestant: Contestant, seq_len: int = 1024) -> list[float]:
    inputs = tensors(seq_len, 0, torch.float32)
    group = HEADS // KV_HEADS
    other = isinstance(contestant, RingAttentionPytorch)
    want = exact(inputs, [h % KV_HEADS if other else h // group for h in range(HEADS)])
    rows = contestant.positions(seq_len)
    got = run(contestant, [x[:, :, rows] for x in inputs])
    worst = torch.stack([(a - b[:, :, rows]).abs().max() for a, b in zip(got, want, strict=True)])
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.tolist()


torch.set_num_threads(1)
dtype = getattr(torch, options.dtype)
local = tensors(options.seq_len // P, RANK, dtype)
whole = tensors(options.seq_len, 0, dtype)
wrong = {name: errors(contestant) for name, contestant in CONTESTANTS.items()}
times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
for _ in range(options.repeats + 1):
    for name, contestant in CONTESTANTS.items():
        times[name].append(seconds(contestant, local, whole))
if RANK == 0:
    ours = times["striped"][1:]
    print(f"{'':28}{'ms':>8}{'over striped':>14}   largest error of out, dq, dk, dv")
    for name, all_seconds in times.items():
        taken = all_seconds[1:]
        ratio = statistics.median(a / b for a, b in zip(taken, ours, strict=True))
        told = " ".join(f"{error:.0e}" for error in wrong[name])
        print(f"{name:28}{1e3 * statistics.median(taken):8.0f}{ratio:14.3f}   {told}")
dist.barrier()
dist.destroy_process_group()
