"""The model's sizes, its names, and that it is torchtitan's LLaMA-3 when one rank runs it."""

import dataclasses

import pytest
import torch
from torchtitan.models.llama3.model import model as titan
from torchtitan.models.llama3.model.args import RoPEScalingArgs
from torchtitan.models.llama3.model.args import TransformerModelArgs as TitanArgs

from recipes.config.schema import Rope
from recipes.models.decoder.args import args_of
from recipes.models.decoder.model import InnerAttention, Transformer
from recipes.models.registry import MODELS
from recipes.preflight import load_config
from striped_cp import Documents
from tests.helpers.models import TOY_WINDOWS, flavor, name_settings
from tests.helpers.reference import reference_attention


@pytest.mark.parametrize(
    ("name", "size", "parameters"),
    [
        ("llama3_striped", "1B", 1_235_814_400),
        ("llama3_striped", "3B", 3_212_749_824),
        ("llama3_striped", "8B", 8_030_261_248),
        ("llama3_striped", "70B", 70_553_706_496),
        ("llama3_striped", "405B", 405_853_388_800),
        ("qwen2_striped", "0.5B", 494_032_768),
        ("qwen2_striped", "7B", 7_615_616_512),
        ("qwen2_striped", "72B", 72_706_203_648),
        ("qwen3_striped", "0.6B", 596_049_920),
        ("qwen3_striped", "8B", 8_190_735_360),
        ("qwen3_striped", "32B", 32_762_123_264),
    ],
)
def test_parameter_counts(name: str, size: str, parameters: int) -> None:
    """Those of the published files."""
    with torch.device("meta"):
        model = Transformer(flavor(size, name))
    shape = MODELS[name].flavors[size]
    assert sum(p.numel() for p in model.parameters()) == parameters == shape.parameters


def make_models(scaling: str) -> tuple[Transformer, titan.Transformer]:
    """The debug model, ours and torchtitan's, with the same weights."""
    args = flavor("debugmodel")
    config = load_config(["--rope.scaling", scaling, "--training.seq_len", "64"])
    args.update_from_config(config)
    ours = Transformer(args)
    torch.manual_seed(0)
    with torch.no_grad():
        ours.init_weights()
    factor = 8.0 if scaling == "llama3" else 1.0
    theirs = titan.Transformer(
        TitanArgs(
            dim=args.dim,
            n_layers=args.n_layers,
            n_heads=args.n_heads,
            n_kv_heads=args.n_kv_heads,
            vocab_size=args.vocab_size,
            multiple_of=args.multiple_of,
            rope_theta=500000.0,
            rope_scaling_args=RoPEScalingArgs(scaling_factor=factor),
            max_seq_len=64,
        )
    )
    with torch.no_grad():
        theirs.init_weights()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


@pytest.mark.parametrize("scaling", ["none", "llama3"])
def test_logits_are_those_of_torchtitan(scaling: str) -> None:
    ours, theirs = make_models(scaling)
    tokens = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), theirs(tokens), rtol=1e-4, atol=1e-4)


def test_documents_do_not_see_each_other() -> None:
    model, _ = make_models("none")
    tokens = torch.randint(0, 2048, (1, 64), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 2048
    documents = Documents.from_cu_seqlens([[0, 24, 64]])
    with torch.no_grad():
        before, after = (model(x, attention_masks=documents) for x in (tokens, changed))
        assert torch.equal(before[:, 24:], after[:, 24:])
        assert not torch.equal(before[:, 5:24], after[:, 5:24])
        # Without documents the change reaches every later token.
        before, after = (model(x) for x in (tokens, changed))
        assert (before[0, 5:] != after[0, 5:]).any(dim=-1).all()


def test_a_document_in_a_pack_is_the_document_alone() -> None:
    model, _ = make_models("none")
    tokens = torch.randint(0, 2048, (1, 64), generator=torch.Generator().manual_seed(1))
    documents = Documents.from_cu_seqlens([[0, 24, 64]])
    positions = torch.cat([torch.arange(24), torch.arange(40)])[None]
    with torch.no_grad():
        packed = model(tokens, attention_masks=documents, positions=positions)
        torch.testing.assert_close(packed[:, :24], model(tokens[:, :24]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed[:, 24:], model(tokens[:, 24:]), rtol=1e-4, atol=1e-4)


def test_a_named_kernel_serves_one_document_too() -> None:
    q, k, v = torch.randn(3, 2, 4, 16, 8, generator=torch.Generator().manual_seed(1))
    torchs_own = InnerAttention("auto")(q, k, v)
    torch.testing.assert_close(InnerAttention("reference")(q, k, v), torchs_own)
    with pytest.raises(ValueError, match="kernel = 'flash' cannot serve"):
        InnerAttention("flash")(q, k, v)


@pytest.mark.parametrize("packed", [False, True])
def test_layers_see_their_windows(monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    """Against dense masks, which stand in for the attention of every layer."""
    args = args_of(TOY_WINDOWS, TOY_WINDOWS.flavors["debugmodel"])
    torch.manual_seed(0)
    model = Transformer(args)
    with torch.no_grad():
        model.init_weights()
    tokens = torch.randint(0, 2048, (2, 64), generator=torch.Generator().manual_seed(1))
    documents = Documents.from_cu_seqlens([[0, 24, 64], [0, 64]]) if packed else None
    got = model(tokens, attention_masks=documents)
    windows = iter((9, None, 25, 9))

    def dense(self, query, key, value, *, documents, **_):
        return reference_attention(query, key, value, documents, window=next(windows)).float()

    monkeypatch.setattr(InnerAttention, "forward", dense)
    torch.testing.assert_close(got, model(tokens, attention_masks=documents), rtol=1e-4, atol=1e-4)
    assert next(windows, "used up") == "used up"


def test_stripes_of_a_model_with_windows_are_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "toy_windows_striped", TOY_WINDOWS)
    recipe = ["--job.config_file", "train_configs/debug_cpu.toml"]
    toy = [*recipe, *name_settings("toy_windows_striped")]
    assert load_config(toy, 2)
    with pytest.raises(ValueError, match=r"striped_cp\.block_size = 8: .* windows.*; allowed: 1$"):
        load_config([*toy, "--striped_cp.block_size", "8"], 2)


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("mask", ["mask", "no_mask"])
def test_a_kernel_that_this_host_lacks_is_refused_at_any_degree(degree: int, mask: str) -> None:
    recipe = ["--job.config_file", "train_configs/debug_cpu.toml", f"--documents.{mask}"]
    degrees = ["--parallelism.context_parallel_degree", str(degree)]
    assert load_config([*recipe, *degrees, "--striped_cp.kernel", "reference"], degree)
    with pytest.raises(ValueError, match=r'striped_cp\.kernel = "flash": '):
        load_config([*recipe, *degrees, "--striped_cp.kernel", "flash"], degree)


def test_rope_settings_reach_the_model() -> None:
    args = flavor("debugmodel")
    config = load_config(["--rope.theta", "1000.0", "--rope.scaling", "none"])
    args.update_from_config(config)
    assert args.rope == Rope(theta=1000.0, scaling="none")


@pytest.mark.parametrize(
    ("name", "value"),
    [("attn_type", "flex"), ("attn_type", "varlen"), ("attn_mask_type", "block_causal")],
)
def test_attention_that_the_model_does_not_have_is_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = '{value}': .*; allowed: '(sdpa|causal)'"):
        dataclasses.replace(flavor("debugmodel"), **{name: value})
