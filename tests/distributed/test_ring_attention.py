"""`ring_attention` on gloo ranks: parity, meshes, DTensors, traffic, endurance."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from striped_cp import (
    Contiguous,
    Documents,
    HeadTail,
    Layout,
    Striped,
    StripedContextParallel,
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from striped_cp.process_group import all_gather_single
from tests.helpers.launch import run_ranks
from tests.helpers.loopback import random_inputs
from tests.helpers.reference import check_all_close, check_close, reference_gradients

LAYOUTS = [Striped(), Striped(4), HeadTail(), Contiguous()]


def ring_mesh(world_size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))


def attention_through_the_ring(
    inputs: tuple[Tensor, ...], mesh: DeviceMesh, layout: Layout, **options
) -> tuple[Tensor, ...]:
    """(out, dq, dk, dv) of whole sequences: shard, ring, unshard, and back."""
    q, k, v, grad_out = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    local = [shard_sequence(x, mesh=mesh, layout=layout, dim=2) for x in leaves]
    out = ring_attention(*local, mesh=mesh, layout=layout, **options)
    full = unshard_sequence(out, mesh=mesh, layout=layout, dim=2)
    full.backward(grad_out)
    return full.detach(), *(x.grad for x in leaves)


def check_parity() -> None:
    world_size = dist.get_world_size()
    mesh = ring_mesh(world_size)
    for layout in LAYOUTS:
        seq_len = layout.divisor(world_size) * (5 if layout != Striped(4) else 3)
        packed = Documents.from_cu_seqlens([[0, 1, seq_len // 2, seq_len], [0, 3, seq_len]])
        for heads in ((4, 2), (3, 1)):
            inputs = random_inputs(2, heads, seq_len, 8, torch.float64, 3.0)
            for documents in (None, packed):
                for rotate_method in ("ring", "allgather"):
                    got = attention_through_the_ring(
                        inputs,
                        mesh,
                        layout,
                        documents=documents,
                        rotate_method=rotate_method,
                        scale=0.3,
                    )
                    want = reference_gradients(*inputs, documents, 0.3)
                    check_all_close(got, want, f"{layout.spec} {rotate_method}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_parity_with_dense_float64(world_size):
    """Five tokens per rank: 2P does not divide S."""
    run_ranks(world_size, check_parity)


def check_strided() -> None:
    mesh = ring_mesh(3)
    seq_len = 15
    q, k, v, grad_out = random_inputs(2, (4, 2), seq_len, 8, torch.float64)
    want = reference_gradients(q, k, v, grad_out)
    rows = Striped().positions(seq_len, 3, mesh.get_local_rank())
    strides = {
        "projection": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "heads first": lambda x: x.contiguous(),
        "every other element": lambda x: torch.stack((x, x), -1).flatten(-2)[..., ::2],
        "dim transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    }
    for name, strided in strides.items():
        leaves = [strided(x[:, :, rows]).requires_grad_() for x in (q, k, v)]
        out = ring_attention(*leaves, mesh=mesh)
        grads = torch.autograd.grad(out, leaves, strided(grad_out[:, :, rows]))
        check_all_close((out, *grads), [x[:, :, rows] for x in want], name)
    # An output gradient without memory of its own, as a sum's backward makes.
    leaves = [x[:, :, rows].requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, mesh=mesh)
    grads = torch.autograd.grad(out.sum(), leaves)
    want = reference_gradients(q, k, v, torch.ones_like(grad_out))
    check_all_close((out, *grads), [x[:, :, rows] for x in want], "expanded")


def test_strided_inputs_and_output_gradients():
    run_ranks(3, check_strided)


def check_dp_and_cp() -> None:
    """Ring ranks are contiguous in dp x cp and not in cp x tp: {0, 2} and {1, 3}."""
    for names, ring_axis in ((("dp", "cp"), "cp"), (("cp", "tp"), "cp")):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)[ring_axis]
        other = dist.get_rank() - mesh.get_local_rank() * (1 if names[0] == "dp" else 2)
        inputs = random_inputs(1, (4, 2), 10, 8, torch.float64, seed=other)
        for rotate_method in ("ring", "allgather"):
            got = attention_through_the_ring(inputs, mesh, Striped(), rotate_method=rotate_method)
            check_all_close(got, reference_gradients(*inputs), f"{names} {rotate_method}")


def test_groups_of_a_two_dimensional_mesh_rotate_inside_themselves():
    run_ranks(4, check_dp_and_cp)


def check_dtensors() -> None:
    layout, seq_len = Striped(), 10
    inputs = random_inputs(2, (4, 2), seq_len, 8, torch.float64)
    documents = Documents.from_cu_seqlens([[0, 3, 10], [0, 9, 10]])
    cases = {
        ("dp", "cp"): (Shard(0), Shard(2)),
        ("cp", "tp"): (Shard(2), Shard(1)),
        ("other", "cp"): (Replicate(), Shard(2)),
    }
    for names, placements in cases.items():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        ring = mesh["cp"]
        # Tokens in the order in which the ranks hold them, so that Shard(2) deals out stripes.
        order = torch.cat([layout.positions(seq_len, 2, rank) for rank in range(2)])
        leaves = [
            distribute_tensor(x[:, :, order].contiguous(), mesh, placements).requires_grad_()
            for x in inputs[:3]
        ]
        rows = [0, 1] if names[0] != "dp" else [mesh.get_local_rank("dp")]
        local_documents = Documents(documents.boundaries[rows])
        module = parallelize_module(torch.nn.Identity(), ring, StripedContextParallel())
        grad_out = distribute_tensor(inputs[3][:, :, order].contiguous(), mesh, placements)
        want = reference_gradients(*inputs, documents)
        for attend in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
            out = attend(*leaves, documents=local_documents, enable_gqa=True)
            assert isinstance(out, DTensor)
            assert out.placements == placements
            assert out.shape == inputs[0].shape
            grads = torch.autograd.grad(out, leaves, grad_out)
            whole_sequences = [x.full_tensor()[:, :, order.argsort()] for x in (out, *grads)]
            check_all_close(whole_sequences, want, str(names))


def test_dtensors_in_and_out():
    run_ranks(4, check_dtensors)


def check_dtensors_without_a_ring(names: tuple[str, str] | None) -> None:
    """Batch and heads over the ranks, the whole sequence on each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    inputs = random_inputs(2, (4, 2), 10, 8, torch.float64)
    q, k, v, grad_out = (distribute_tensor(x, mesh, (Shard(0), Shard(1))) for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring_attention(*leaves, mesh=None)
    grads = torch.autograd.grad(out, leaves, grad_out)
    check_all_close([x.full_tensor() for x in (out, *grads)], reference_gradients(*inputs))


@pytest.mark.parametrize("names", [("dp", "tp"), None])
def test_dtensors_without_a_ring(names):
    run_ranks(4, check_dtensors_without_a_ring, names)


def check_placements_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    x = torch.randn(2, 4, 8, 8)

    def attend(placements, other=None, mesh=mesh):
        q = DTensor.from_local(x, mesh, placements, run_check=False)
        k = q if other is None else DTensor.from_local(x, mesh, other, run_check=False)
        return ring_attention(q, k, k, mesh=mesh["cp"] if "cp" in mesh.mesh_dim_names else ring)

    ring = mesh["cp"]
    works = (Shard(2), Shard(1))
    with pytest.raises(ValueError, match=r"Partial\(sum\) on mesh axis 'tp' .*Shard\(1\), Replic"):
        attend((Shard(2), Partial()))
    with pytest.raises(ValueError, match=r"Replicate\(\) on mesh axis 'cp' .*allowed: Shard\("):
        attend((Replicate(), Shard(1)))
    with pytest.raises(ValueError, match="mesh axis 'tp' cannot work"):
        attend((Shard(2), Shard(3)))
    with pytest.raises(ValueError, match="equal placements"):
        attend(works, (Shard(2), Replicate()))
    with pytest.raises(ValueError, match="must all be DTensors"):
        ring_attention(DTensor.from_local(x, mesh, works, run_check=False), x, x, mesh=ring)
    with pytest.raises(ValueError, match="the ring's axis 'cp'; its axes are"):
        attend((Shard(0),), mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    with pytest.raises(ValueError, match=r"must have one dimension.*\('cp', 'tp'\)"):
        ring_attention(x, x, x, mesh=mesh)
    odd = distribute_tensor(torch.randn(1, 3, 8, 8), mesh, works)
    with pytest.raises(ValueError, match="3 heads do not divide over 2 ranks"):
        ring_attention(odd, odd, odd, mesh=ring)


def test_placements_that_cannot_work_are_refused_by_name():
    run_ranks(4, check_placements_refused)


def check_refused_before_anything_is_sent() -> None:
    mesh = ring_mesh(2)
    x = torch.randn(1, 4, 5, 8)
    refusals = [
        lambda: ring_attention(x[:, :3], x[:, :2], x[:, :2], mesh=mesh),
        lambda: ring_attention(x, x.double(), x, mesh=mesh),
        lambda: ring_attention(x, x, x, mesh=mesh, layout=Striped(4)),
        lambda: ring_attention(x, x, x, mesh=mesh, kernel="flash"),
        lambda: ring_attention(x, x, x, mesh=mesh, documents=Documents.from_cu_seqlens([[0, 9]])),
        lambda: shard_sequence(torch.zeros(1, 9), mesh=mesh),
        lambda: unshard_sequence(torch.zeros(1, 9), mesh=mesh, layout=Striped(4)),
    ]
    nothing = mock.Mock(side_effect=AssertionError("communicated before refusing"))
    with (
        mock.patch.object(dist, "batch_isend_irecv", nothing),
        mock.patch("striped_cp.shard.all_gather_single", nothing),
    ):
        for refusal in refusals:
            with pytest.raises(ValueError, match=r"multiple|dtype|serve|documents"):
                refusal()


def test_refusals_come_before_the_first_collective():
    run_ranks(2, check_refused_before_anything_is_sent)


def check_traffic() -> list[int]:
    world_size = dist.get_world_size()
    mesh = ring_mesh(world_size)
    batch, kv_heads, rows, dim = 2, 2, 5, 8
    q, k, v, grad_out = (
        x[:, :, :rows]
        for x in random_inputs(batch, (4, kv_heads), rows * world_size, dim, torch.bfloat16)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    posted: list[list[dist.P2POp]] = []
    original = dist.batch_isend_irecv

    def spy(ops: list[dist.P2POp]):
        posted.append([(op.op, op.tensor.nbytes, op.tensor.data_ptr()) for op in ops])
        return original(ops)

    with mock.patch.object(dist, "batch_isend_irecv", spy):
        out = ring_attention(*leaves, mesh=mesh)
        forward, posted[:] = list(posted), []
        out.backward(grad_out)
        backward = list(posted)
    kv_bytes = batch * kv_heads * rows * dim * 2  # of K or V, bfloat16

    def sent(hop):
        return [nbytes for op, nbytes, _ in hop if op is dist.isend]

    def received(hop):
        return [nbytes for op, nbytes, _ in hop if op is dist.irecv]

    # Forward: K and V go P - 1 hops, as they are. Nothing else is sent.
    assert [sent(hop) for hop in forward] == [[kv_bytes, kv_bytes]] * (world_size - 1)
    # Backward: K and V once more, and their gradients in float32 P hops, home again.
    hops = sorted(sent(hop)[0] for hop in backward)
    assert hops == [kv_bytes] * (world_size - 1) + [2 * kv_bytes] * world_size
    for hop in forward + backward:
        assert sent(hop) == received(hop)
        assert len(hop) == 4
    # At most two buffers of K and of V besides the local ones.
    buffers = {address for hop in forward for op, _, address in hop if op is dist.irecv}
    assert len(buffers) <= 2 * 2
    return [len(forward), len(backward)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_traffic_is_the_keys_and_values_once_per_hop_on_every_rank(world_size):
    counts = run_ranks(world_size, check_traffic)
    assert counts == [[world_size - 1, 2 * world_size - 1]] * world_size


def check_allgather_is_one_collective() -> None:
    mesh = ring_mesh(3)
    q, k, v = (x[:, :, :4] for x in random_inputs(1, (2, 1), 12, 8, torch.float32)[:3])
    with mock.patch(
        "striped_cp.process_group.all_gather_single", side_effect=all_gather_single
    ) as gather:
        ring_attention(q, k, v, mesh=mesh, rotate_method="allgather")
    assert gather.call_count == 1


def test_allgather_is_one_collective():
    run_ranks(3, check_allgather_is_one_collective)


def check_shard_and_unshard() -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))["cp"]
    for layout in LAYOUTS:
        seq_len = layout.divisor(2) * 3
        for dim in (0, 1, -1):
            for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8):
                shape = [2, 3, 2]
                shape[dim] = seq_len
                full = torch.randint(0, 2, shape).to(dtype)
                local = shard_sequence(full, mesh=mesh, layout=layout, dim=dim)
                rows = layout.positions(seq_len, 2, mesh.get_local_rank())
                assert torch.equal(local, full.index_select(dim, rows))
                assert torch.equal(unshard_sequence(local, mesh=mesh, layout=layout, dim=dim), full)
        full = torch.randn(2, seq_len, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, seq_len, dtype=torch.float64)
        local = shard_sequence(full, mesh=mesh, layout=layout)
        (local * shard_sequence(weight, mesh=mesh, layout=layout)).sum().backward()
        assert torch.equal(full.grad, weight)
        local = local.detach().requires_grad_()
        (unshard_sequence(local, mesh=mesh, layout=layout) * weight).sum().backward()
        assert torch.equal(local.grad, shard_sequence(weight, mesh=mesh, layout=layout))
        check_second_derivatives(mesh, layout, weight)
    assert world_size == 4


def check_second_derivatives(mesh, layout, values) -> None:
    """Of x^3, through both functions: the gradient of the squared gradient is 36 x^3."""
    full = values.clone().requires_grad_()
    cubes = shard_sequence(full, mesh=mesh, layout=layout) ** 3
    (gradient,) = torch.autograd.grad(cubes.sum(), full, create_graph=True)
    check_close("shard", torch.autograd.grad((gradient**2).sum(), full)[0], 36 * values**3)
    local = shard_sequence(values, mesh=mesh, layout=layout).requires_grad_()
    cubes = unshard_sequence(local, mesh=mesh, layout=layout) ** 3
    (gradient,) = torch.autograd.grad(cubes.sum(), local, create_graph=True)
    (second,) = torch.autograd.grad((gradient**2).sum(), local)
    check_close("unshard", second, 36 * local.detach() ** 3)


def test_shard_and_unshard_are_inverse_and_differentiable():
    run_ranks(4, check_shard_and_unshard)


def check_what_cannot_be_sharded() -> None:
    mesh = ring_mesh(2)
    for function in (shard_sequence, unshard_sequence):
        for dim in (2, -3):
            with pytest.raises(ValueError, match=rf"dim = {dim}: the tensor has 2 dimensions"):
                function(torch.zeros(2, 4), mesh=mesh, dim=dim)
        x = DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(1)])
        with pytest.raises(ValueError, match="expected a plain tensor, not a DTensor"):
            function(x, mesh=mesh)


def test_what_cannot_be_sharded_is_refused():
    run_ranks(2, check_what_cannot_be_sharded)


def check_compiled() -> None:
    mesh = ring_mesh(2)
    q, k, v = (x[:, :, :6] for x in random_inputs(1, (4, 2), 12, 8, torch.float32)[:3])
    projection = torch.nn.Linear(8, 8)

    def block(q, k, v, documents):
        return projection(ring_attention(projection(q), k, v, mesh=mesh, documents=documents))

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for documents in (None, Documents.from_cu_seqlens([[0, 5, 12]])):
        want, got = (f(q, k, v, documents) for f in (block, compiled))
        check_close("out", got.detach(), want.detach())
        want, got = (torch.autograd.grad(x.sum(), projection.weight)[0] for x in (want, got))
        check_close("gradient", got, want)


def test_compile_fullgraph():
    run_ranks(2, check_compiled)


def check_endurance(iterations: int) -> None:
    mesh = ring_mesh(dist.get_world_size())
    q, k, v, grad_out = (
        x[:, :, :5] for x in random_inputs(1, (2, 1), 5 * mesh.size(), 8, torch.float32)
    )
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    first = None
    for _ in range(iterations):
        out = ring_attention(*leaves, mesh=mesh)
        grads = torch.autograd.grad(out, leaves, grad_out)
        first = first or (out.detach(), *grads)
        for a, b in zip(first, (out.detach(), *grads), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("world_size", [3, 4])
def test_three_hundred_rings_without_a_hang_and_bitwise_equal(world_size):
    run_ranks(world_size, check_endurance, 300, timeout=120)
