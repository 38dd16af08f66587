"""FLOPs against Megatron's own formula.

Where Megatron's `num_floating_point_operations` is not what a model computes, the difference is asserted; it

- leaves out the router of a MoE layer, and the indexer of sparse attention;
- counts sliding windows and sparse attention as full attention;
- adds the norms of MLA's latent vectors and those of a multi-token-prediction depth, and no other norms;
- takes a Mamba layer for twice as wide as the model, whatever its heads.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomllib
from megatron_formula import megatron_flops

from megatron_balance import ModelShape
from megatron_balance.model.flops import fwd_flops
from megatron_balance.model.hf_config import PRESETS


def assert_known_differences(shape):
    """Ours, with windows and sparse attention in full as Megatron counts them, differs by its omissions alone."""
    full = replace(shape, dsa_indexer_topk=0)
    layers = [kind for layer in full.layers() for kind in (layer.mixer, layer.mlp)]
    flops, hidden_size = fwd_flops(full), shape.hidden_size
    linear, quadratic = flops.linear + flops.expert_linear, flops.quadratic + sum(c for _, c in flops.windows)
    linear -= 2 * hidden_size * shape.num_experts * layers.count("moe")  # the router
    linear += 2 * (shape.q_lora_rank + shape.kv_lora_rank) * layers.count("mla")  # norms of the latent vectors
    linear += 6 * hidden_size * shape.mtp_num_layers  # three norms a depth
    if "mamba" in layers:
        # As wide as the heads of twice the model's width, but for the heads' own columns.
        heads = 2 * hidden_size // shape.mamba_head_dim
        linear += fwd_flops(replace(shape, mamba_num_heads=heads)).linear - fwd_flops(shape).linear
        linear -= 2 * hidden_size * (heads - shape.mamba_num_heads) * layers.count("mamba")
    assert (linear, quadratic) == pytest.approx(megatron_flops(shape), rel=1e-12, abs=0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_agree_but_for_what_megatron_leaves_out(name):
    assert_known_differences(ModelShape.preset(name))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("DeepSeek-V3", {"q_lora_rank": 0}),
        ("DeepSeek-V3", {"mtp_num_layers": 1}),
        ("DeepSeek-V3", {"mtp_num_layers": 2}),
        *(("Qwen3-30B-A3B", {"moe_latent_size": size, "gated_linear_unit": size > 0}) for size in (0, 512)),
        *(("Qwen3-30B-A3B", {"moe_latent_size": size, "gated_linear_unit": size == 0}) for size in (0, 512)),
    ],
)
def test_so_do_other_shapes(name, changed):
    if name.startswith("Qwen3"):
        changed = changed | {"moe_shared_expert_intermediate_size": 768, "moe_layer_freq": (0, 1, 1) * 16}
    assert_known_differences(replace(ModelShape.preset(name), **changed))


@pytest.mark.parametrize("name", ["gemma-3-12b", "gpt-oss-20b", "DeepSeek-V3.2", "GLM-5"])
def test_ours_counts_windows_and_sparse_attention_as_less(name):
    assert fwd_flops(ModelShape.preset(name)).quadratic < megatron_flops(ModelShape.preset(name))[1]


# The real parser -----------------------------------------------------------------------------------------------------

OPTIONS = tomllib.loads(Path(__file__).with_name("presets.toml").read_text())


def parse(monkeypatch, text):
    from megatron.training import arguments

    monkeypatch.setattr(sys, "argv", ["train", *OPTIONS["run"].split(), *text.split()])
    return arguments.parse_args()


@pytest.mark.parametrize(("name", "text"), OPTIONS["presets"].items())
def test_the_real_parser_gives_the_preset(monkeypatch, name, text):
    args = parse(monkeypatch, text)
    expected = fwd_flops(ModelShape.preset(name))
    assert fwd_flops(ModelShape.from_megatron_args(args)) == expected


def test_the_defaults_of_validate_args_are_ours(monkeypatch):
    text = "--num-layers 4 --hidden-size 96 --num-attention-heads 4 --swiglu --num-experts 4 --moe-layer-freq 2 "
    from megatron.training import arguments

    args = parse(monkeypatch, text + "--moe-router-topk 2 --vocab-size 1000 --no-rope-fusion")
    before = ModelShape.from_megatron_args(args)
    flops = fwd_flops(before)
    arguments.validate_args(args)
    assert fwd_flops(ModelShape.from_megatron_args(args)) == flops
    assert (before.ffn_hidden_size, before.kv_channels, before.moe_ffn_hidden_size) == (256, 24, 256)
    assert before.padded_vocab_size == 1024
    config = arguments.core_transformer_config_from_args(args)
    assert fwd_flops(ModelShape.from_transformer_config(config, padded_vocab_size=1024)) == flops
