"""Ring attention as a module, and as a parallel style for `parallelize_module`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from .attention import RotateMethod, check_options, check_unsupported, ring_attention
from .axes import axes_of
from .documents import Documents
from .layout import TOKEN_STRIPES, Layout


class RingAttention(nn.Module):
    """`ring_attention` with its mesh and options fixed, called like scaled_dot_product_attention.

    Arguments of that function which the ring does not have are refused with a ValueError.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        layout: Layout = TOKEN_STRIPES,
        rotate_method: RotateMethod = "ring",
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        check_options(layout, rotate_method, kernel)
        axes_of(mesh)
        self.mesh = mesh
        self.layout = layout
        self.rotate_method = rotate_method
        self.kernel = kernel

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = True,
        *,
        documents: Documents | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        window: int | None = None,
        sinks: Tensor | None = None,
        **unsupported: object,
    ) -> Tensor:
        """(B, H, S/P, D) attention output; see `ring_attention`.

        Raises:
            ValueError: also for a mask, dropout, or non-causal attention.
        """
        check_unsupported(
            {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **unsupported}
        )
        if query.dim() == 4 and query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                f"{query.shape[1]} query heads and {key.shape[1]} key heads need enable_gqa = True"
            )
        return ring_attention(
            query,
            key,
            value,
            mesh=self.mesh,
            layout=self.layout,
            documents=documents,
            scale=scale,
            rotate_method=self.rotate_method,
            kernel=self.kernel,
            window=window,
            sinks=sinks,
        )


class StripedContextParallel(ParallelStyle):
    """Makes an attention module, one that takes (query, key, value), run on the ring.

        parallelize_module(block.attention.inner_attention, cp_mesh, StripedContextParallel())

    The module's own forward is not called any more: its options (scale, dropout) end here. Plain
    tensors stay plain, DTensors stay DTensors: the module's inputs are this rank's tokens
    under `layout`, as `shard_sequence` deals them out.

    Raises:
        ValueError: an unknown layout, rotate_method or kernel, or a mesh that is no ring.
    """

    def __init__(
        self,
        layout: Layout = TOKEN_STRIPES,
        rotate_method: RotateMethod = "ring",
        kernel: str = "auto",
    ) -> None:
        super().__init__()
        check_options(layout, rotate_method, kernel)
        self.layout = layout
        self.rotate_method = rotate_method
        self.kernel = kernel

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        ring = RingAttention(device_mesh, self.layout, self.rotate_method, self.kernel)
        module.forward = ring.forward
        return module
