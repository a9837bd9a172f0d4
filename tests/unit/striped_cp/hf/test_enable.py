"""What an enabled model refuses, what it finds out, and that nothing is left of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as tf
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from striped_cp import Contiguous, Striped
from striped_cp.hf import chunked_loss, disable, enable, shard_batch
from tests.helpers.hf_ring import DOCUMENTS, make_batch, make_model, one_rank


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = tmp_path_factory.mktemp("store") / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    torch.distributed.destroy_process_group()


SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MIXTRAL = {**SIZES, "num_local_experts": 2}
LLAMA4 = {**SIZES, "num_local_experts": 2, "layer_types": ["chunked_attention"] * 2}
LINEAR = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "num_experts": 2}
REFUSED = {
    "chunks": (tf.Llama4TextConfig(**LLAMA4), "layer 0 is chunked_attention; allowed are full_"),
    "softcap": (
        tf.Gemma2Config(**SIZES, layer_types=["full_attention"] * 2),
        "attn_logit_softcapping = 50.0: must be None",
    ),
    "linear attention": (tf.Qwen3NextConfig(**SIZES, **LINEAR), "layer 0 is linear_attention"),
    "balancing loss": (
        tf.MixtralConfig(**MIXTRAL, sliding_window=None, output_router_logits=True),
        "output_router_logits = True",
    ),
    "rope of the input's length": (
        tf.LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rope_type = 'dynamic'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_what_it_is(name: str, mesh: DeviceMesh) -> None:
    config, reason = REFUSED[name]
    model = tf.AutoModelForCausalLM.from_config(config)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="cannot run on the ring") as error:
        enable(model, mesh)
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert model.config._attn_implementation == before


def test_encoders_are_refused(mesh: DeviceMesh) -> None:
    bert = tf.BertConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, is_decoder=False
    )
    with pytest.raises(ValueError, match="is not causal"):
        enable(tf.BertModel(bert), mesh)


def test_a_bypassed_layer_is_named(mesh: DeviceMesh) -> None:
    model = enable(make_model("llama"), mesh)
    attention = model.model.layers[1].self_attn
    attention.config = tf.LlamaConfig(**(model.config.to_dict() | {"attn_implementation": "sdpa"}))
    attention.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"did not run on the ring: model\.layers\.1\.self_attn;"):
        model(**shard_batch(*make_batch(), mesh))


def test_a_switched_kernel_is_an_error(mesh: DeviceMesh) -> None:
    model = enable(make_model("llama"), mesh)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*layers\.2\.self_attn"):
        model(**shard_batch(*make_batch(), mesh))


WRONG = {
    "position_ids": torch.arange(96).expand(2, -1),  # of the rows, not of the documents
    "attention_mask": torch.ones(2, 96),
    "use_cache": True,
    "cache": tf.DynamicCache(),
    "output_router_logits": True,
    "ring": None,
    "shift_labels": None,
    "num_items_in_batch": None,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named(name: str, mesh: DeviceMesh) -> None:
    model = enable(make_model("llama"), mesh)
    batch = shard_batch(*make_batch(), mesh, DOCUMENTS) | {name: WRONG[name]}
    with pytest.raises(ValueError, match=name):
        model(**batch)


def test_a_batch_of_another_layout_is_refused(mesh: DeviceMesh) -> None:
    model = enable(make_model("llama"), mesh)
    with pytest.raises(ValueError, match=r"laid out as 'contiguous' on a mesh \(1,\), the "):
        model(**shard_batch(*make_batch(), mesh, layout=Contiguous()))


def test_dropout_is_refused_in_training_alone(mesh: DeviceMesh) -> None:
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    enable(model, mesh)
    batch = shard_batch(*make_batch(), mesh)
    model.eval()(**batch)
    with pytest.raises(ValueError, match=r"dropout = 0\.1"):
        model.train()(**batch)


def test_a_window_that_its_mask_does_not_have_is_an_error(mesh: DeviceMesh) -> None:
    """What the layer asks for and what the model masks must be one window."""
    model = enable(make_model("gemma3"), mesh)
    batch = shard_batch(*make_batch(), mesh)
    model(**batch)
    model.model.layers[1].self_attn.sliding_window = 9  # a layer of full attention
    with pytest.raises(ValueError, match=r"sliding_window = 9, but the window of its mask is None"):
        model(**batch)
    model.model.layers[0].self_attn.sliding_window = 5
    with pytest.raises(ValueError, match=r"sliding_window = 5, but the window of its mask is 9"):
        model(**batch)


def test_sinks_that_attention_is_not_told_of_are_an_error(mesh: DeviceMesh) -> None:
    model = make_model("llama")
    model.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(4))
    enable(model, mesh)
    with pytest.raises(ValueError, match="LlamaAttention has sinks and hands none to its"):
        model(**shard_batch(*make_batch(), mesh))


def test_block_stripes_have_no_windows(mesh: DeviceMesh) -> None:
    model = enable(make_model("mistral"), mesh, layout=Striped(8))
    with pytest.raises(ValueError, match="layout = 'striped:8' has no sliding windows"):
        model(**shard_batch(*make_batch(), mesh, layout=Striped(8)))


def test_a_loss_that_shifts_labels_itself_fails(mesh: DeviceMesh) -> None:
    model = enable(make_model("llama"), mesh)

    def own(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:])

    model.loss_function = own
    with pytest.raises((ValueError, RuntimeError)):
        model(**shard_batch(*make_batch(), mesh))


def test_models_and_layouts_in_one_process_and_nothing_left_behind(mesh: DeviceMesh) -> None:
    ids, labels = make_batch()
    expected = {
        name: one_rank(make_model(name), ids, labels, DOCUMENTS) for name in ("llama", "qwen3")
    }
    models = {name: make_model(name) for name in expected}
    layouts = {"llama": None, "qwen3": Contiguous()}
    for name, model in models.items():
        enable(model, mesh, layout=Contiguous())
        enable(model, mesh, layout=layouts[name])  # the later one counts
    for name, model in models.items():
        batch = shard_batch(ids, labels, mesh, DOCUMENTS, layout=layouts[name])
        torch.testing.assert_close(model(**batch).loss, expected[name], rtol=1e-6, atol=0)
    for model in models.values():
        disable(model)
        disable(model)
        assert model.config._attn_implementation == "sdpa"
        assert not model._forward_pre_hooks
        assert not model.model._forward_pre_hooks
        assert not model.model._forward_hooks
        assert not any(hasattr(m, "ring_pass") for m in model.modules())
        model(input_ids=ids, labels=labels)


def test_a_chunked_loss_knows_what_it_cannot_compute(mesh: DeviceMesh) -> None:
    ids, labels = make_batch()
    scaled = tf.AutoModelForCausalLM.from_config(tf.GraniteConfig(**SIZES, logits_scaling=8.0))
    enable(scaled, mesh)
    batch = shard_batch(ids % 32, labels.clamp(max=31), mesh)
    with pytest.raises(ValueError, match="GraniteForCausalLM changes its logits after the output"):
        chunked_loss(scaled, batch)
    with pytest.raises(ValueError, match="the batch has no labels: give them to shard_batch"):
        chunked_loss(enable(make_model("llama"), mesh), shard_batch(ids, None, mesh))
