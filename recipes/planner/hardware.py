"""GPUs, networks and attention kernels, with the public source of every figure.

Rates are TFLOPS (10^12 per second), bandwidths GB/s (10^9 bytes per second, one direction),
capacities GiB (2^30 bytes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KernelRate:
    """Causal attention throughput in TFLOPS, forward and backward, head_dim 128, bf16, 16K tokens.

    FLOPs are counted with the causal half only, and 2.5 times the forward for the backward.

    Attributes:
        packed: the same where documents are packed; None: as without.
        long: the same for tiles of 32K rows and more; None: as for 16K.
    """

    forward: float
    backward: float
    packed: tuple[float, float] | None = None
    long: tuple[float, float] | None = None

    def of(self, packed: bool, rows: int) -> tuple[float, float]:
        """Forward and backward, of tiles with so many rows."""
        if packed and self.packed is not None:
            return self.packed
        if rows >= 32_768 and self.long is not None:
            return self.long
        return self.forward, self.backward


@dataclass(frozen=True)
class Gpu:
    """One accelerator and its node.

    Attributes:
        peak_tflops: bf16 dense peak, the denominator of MFU.
        matmul_tflops: best bf16 matrix product measured on it.
        memory_gib: what torch reports as total memory of the device.
        hbm_gb_s: peak memory bandwidth.
        p2p_gb_s: measured rate of one neighbour to another inside the node.
        collective_gb_s: rate per GPU of an all-gather inside the node.
        host_gb_s: measured rate to and from pinned host memory.
        multiprocessors: what NVIDIA calls SMs and AMD compute units.
        kernels: attention rates by kernel name.
        network: default network between nodes.
    """

    name: str
    peak_tflops: float
    matmul_tflops: float
    memory_gib: float
    hbm_gb_s: float
    p2p_gb_s: float
    collective_gb_s: float
    host_gb_s: float
    multiprocessors: int
    kernels: dict[str, KernelRate]
    network: str = "ib400"
    gpus_per_node: int = 8


# Kernel rates.
# "flash" is FlashAttention-2, which torch ships; "cudnn" is cuDNN through torch's SDPA; "fa3" and
# "fa4" are packages of their own.
# H100: kernel benchmark of MagiAttention (SandAI-org/MagiAttention, commit 2c64135, figures dated
# 2026-02, read off the charts): FA2 363/323, SDPA 589/499, FA3 672/562 (679/586 at 32K),
# FlexAttention 384/251; with documents (variable length, four of them) FA2 345/263, FA3 585/426.
# The FlashAttention README and the FlashAttention-3 paper (arXiv 2407.08608) agree within 8 %.
_HOPPER = {
    "flash": KernelRate(363, 323, packed=(345, 263)),
    "fa3": KernelRate(672, 562, packed=(585, 426), long=(679, 586)),
    "cudnn": KernelRate(589, 499),
    "flex": KernelRate(384, 251),
}
# A100: FlashAttention README, forward + backward 189; the two are not published apart.
# FlexAttention on A100 reaches 90 % and 85 % of it (PyTorch blog "FlexAttention").
_A100_KERNELS = {"flash": KernelRate(189, 189), "flex": KernelRate(0.90 * 189, 0.85 * 189)}
# B200: the same MagiAttention benchmark: SDPA 1325/940, FA4 1390/1090 (at 32K), FlexAttention
# 385/87. FlashAttention-2 has no published rate there; assumed: Hopper's, since it does not use
# Blackwell's new matrix instructions.
_B200_KERNELS = {
    "flash": _HOPPER["flash"],
    "fa4": KernelRate(1390, 1090),
    "cudnn": KernelRate(1325, 940),
    "flex": KernelRate(385, 87),
}
# MI300X: no published forward and backward rate at these shapes was found. Assumed: the share of
# the measured matrix product that FlashAttention-2 reaches on A100 (189 / 271).
_MI300X_KERNELS = {"flash": KernelRate(466, 466)}

# Where no other source is named: stas00/ml-engineering, compute/accelerator and network chapters
# (commit 744d01e), and torchtitan 0.2.2 tools/utils.py get_peak_flops for peaks. `memory_gib` is
# "total capacity" as torch prints it in out-of-memory errors. Inside a node, NVLink 4 moves 396 of
# its 450 GB/s between two GPUs (ml-engineering); the other links are given the same 88 %.
_NVLINK_SHARE = 396 / 450
# 55 GB/s of 63 (PCIe 5.0 x16) measured to and from pinned host memory; half of that on PCIe 4.0.
_PCIE5_GB_S = 55.0
_PCIE4_GB_S = 27.0
# torchtitan's 202412 benchmark ran H100s of 96 GB HBM2e (2.4 TB/s) held at 500 of 700 W
# (benchmarks/llama3_h100_202412_torchtitan.md); tensor-core rates are taken to follow the power.
_H100_96_POWER = 500 / 700

_H100 = Gpu(
    "H100 SXM 80 GB",
    peak_tflops=989,
    matmul_tflops=795,
    memory_gib=79.1,
    hbm_gb_s=3350,
    p2p_gb_s=450 * _NVLINK_SHARE,
    collective_gb_s=450 * _NVLINK_SHARE,
    host_gb_s=_PCIE5_GB_S,
    multiprocessors=132,
    kernels=_HOPPER,
)

GPUS: dict[str, Gpu] = {
    "a100": Gpu(
        "A100 SXM 80 GB",
        peak_tflops=312,
        matmul_tflops=271,
        memory_gib=79.15,
        hbm_gb_s=2039,
        p2p_gb_s=300 * _NVLINK_SHARE,
        collective_gb_s=300 * _NVLINK_SHARE,
        host_gb_s=_PCIE4_GB_S,
        multiprocessors=108,
        kernels=_A100_KERNELS,
        network="ib200",
    ),
    "h100": _H100,
    "h100-96": replace(
        _H100,
        name="H100 96 GB HBM2e, 500 W",
        matmul_tflops=_H100.matmul_tflops * _H100_96_POWER,
        memory_gib=95.0,
        hbm_gb_s=2400,
        kernels={
            name: KernelRate(_H100_96_POWER * rate.forward, _H100_96_POWER * rate.backward)
            for name, rate in _HOPPER.items()
        },
    ),
    "h200": replace(_H100, name="H200 SXM 141 GB", memory_gib=139.8, hbm_gb_s=4800),
    "b200": Gpu(
        "B200 SXM 180 GB",
        peak_tflops=2250,
        matmul_tflops=1745,
        memory_gib=178.35,
        hbm_gb_s=8000,
        p2p_gb_s=900 * _NVLINK_SHARE,
        collective_gb_s=900 * _NVLINK_SHARE,
        host_gb_s=_PCIE5_GB_S,
        multiprocessors=148,
        kernels=_B200_KERNELS,
    ),
    "mi300x": Gpu(
        "MI300X 192 GB",
        peak_tflops=1307,
        matmul_tflops=668,
        memory_gib=191.98,
        hbm_gb_s=5300,
        # One xGMI link joins two GPUs (64 GB/s); a collective drives all seven (448 GB/s).
        p2p_gb_s=64 * _NVLINK_SHARE,
        collective_gb_s=448 * _NVLINK_SHARE,
        host_gb_s=_PCIE5_GB_S,
        multiprocessors=304,
        kernels=_MI300X_KERNELS,
    ),
}

# Between nodes, GB/s per GPU (one NIC per GPU): line rate of the link. 400 Gb/s NDR InfiniBand is
# the fabric of the H100 runs above; AWS p5 nodes have 3,200 Gb/s of EFA for eight GPUs.
NETWORKS_GB_S: dict[str, float] = {
    "eth100": 12.5,
    "ib200": 25.0,
    "ib400": 50.0,
    "efa400": 50.0,
    "ib800": 100.0,
}
# Share of the line rate that NCCL reaches on large messages. Assumed; no published figure per link.
NETWORK_SHARE = 0.9


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`; ValueError names what is known."""
    if name not in GPUS:
        raise ValueError(f'--gpu "{name}": unknown; known: {", ".join(GPUS)}')
    return GPUS[name]


def find_network_gb_s(name: str) -> float:
    """Usable GB/s per GPU between nodes of the network called `name`."""
    if name not in NETWORKS_GB_S:
        raise ValueError(f'--network "{name}": unknown; known: {", ".join(NETWORKS_GB_S)}')
    return NETWORKS_GB_S[name] * NETWORK_SHARE


def gpu_from_device_name(device_name: str) -> str | None:
    """Key in `GPUS` for a name that torch reports ("NVIDIA H100 80GB HBM3"), None if not listed."""
    lowered = device_name.lower()
    if "h100" in lowered and "96gb" in lowered:
        return "h100-96"
    if "gh200" in lowered:  # an H100 with memory and links of its own
        return None
    return next((key for key in ("a100", "h100", "h200", "b200", "mi300x") if key in lowered), None)
