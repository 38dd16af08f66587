"""FLOPs against Megatron's own formula.

Where Megatron's `num_floating_point_operations` is not what a model computes, the difference is asserted; it

- leaves out the router of a MoE layer, and the indexer of sparse attention;
- counts sliding windows and sparse attention as full attention;
- adds the norms of MLA's latent vectors and those of a multi-token-prediction depth, and no other norms;
- takes a Mamba layer for twice as wide as the model, whatever its heads.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace

import pytest
from megatron_formula import megatron_flops

from megatron_balance.model import PRESETS, ModelShape, fwd_flops


def our_flops(shape: ModelShape) -> tuple[int, int]:
    """Ours, with windows counted in full as Megatron does."""
    flops = fwd_flops(shape)
    return flops.linear + flops.expert_linear, flops.quadratic + sum(c for _, c in flops.windows)


def count(shape: ModelShape, kind: str) -> int:
    layers = (*shape.decoder_layers(), *shape.mtp_layers())
    return sum(kind in (layer.mixer, layer.mlp) for layer in layers)


def router(shape: ModelShape) -> int:
    """Ours counts the router's GEMM, Megatron does not."""
    return 2 * shape.hidden_size * shape.num_experts * count(shape, "moe")


def mla_norms(shape: ModelShape) -> int:
    """Megatron counts the norms of MLA's latent vectors and no other, ours none."""
    return 2 * (shape.q_lora_rank + shape.kv_lora_rank) * count(shape, "mla")


def assert_flops(ours: tuple[float, float], theirs: tuple[float, float]) -> None:
    assert ours == pytest.approx(theirs, rel=1e-12, abs=0)


DENSE = [name for name, config in PRESETS.items() if config["model_type"] in ("qwen2", "qwen3", "llama")]
DENSE += ["Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3.5-27B", "Nemotron-H-8B"]
MOE = ["Qwen3-30B-A3B", "Qwen3-235B-A22B", "Mixtral-8x7B", "Qwen3-Next-80B-A3B", "Qwen3.5-35B-A3B", "Qwen3.5-397B-A17B"]
MOE += ["GLM-4.5", "MiniMax-M2", "Nemotron-3-Super-120B-A12B"]
WINDOWED = ["gemma-3-12b", "gpt-oss-20b", "gpt-oss-120b"]
LATENT = ["DeepSeek-V3", "Kimi-K2"]
SPARSE = ["DeepSeek-V3.2", "GLM-5"]


def test_every_preset_is_checked_below() -> None:
    assert {*DENSE, *MOE, *WINDOWED, *LATENT, *SPARSE, "Nemotron-3-Nano-30B-A3B"} == set(PRESETS)


@pytest.mark.parametrize("name", DENSE)
def test_dense_presets_agree(name: str) -> None:
    shape = ModelShape.preset(name)
    assert_flops(our_flops(shape), megatron_flops(shape))


@pytest.mark.parametrize("name", MOE)
def test_moe_presets_agree_but_for_the_router(name: str) -> None:
    shape = ModelShape.preset(name)
    linear, quadratic = our_flops(shape)
    assert router(shape) > 0
    assert_flops((linear - router(shape), quadratic), megatron_flops(shape))


@pytest.mark.parametrize("name", LATENT)
def test_mla_agrees_but_for_the_norms_and_the_router(name: str) -> None:
    shape = ModelShape.preset(name)
    linear, quadratic = our_flops(shape)
    assert_flops((linear - router(shape) + mla_norms(shape), quadratic), megatron_flops(shape))
    plain = replace(shape, q_lora_rank=0)
    linear, quadratic = our_flops(plain)
    assert_flops((linear - router(plain) + mla_norms(plain), quadratic), megatron_flops(plain))


@pytest.mark.parametrize("name", SPARSE)
def test_megatron_counts_sparse_attention_as_full_and_forgets_the_indexer(name: str) -> None:
    shape = ModelShape.preset(name)
    dense = replace(shape, dsa_indexer_topk=0)
    assert fwd_flops(shape).quadratic < fwd_flops(dense).quadratic
    linear, quadratic = our_flops(dense)
    known = mla_norms(dense) - router(dense)
    assert_flops((linear + known, quadratic), megatron_flops(shape))


@pytest.mark.parametrize("name", WINDOWED)
def test_megatron_counts_windows_as_full_attention(name: str) -> None:
    shape = ModelShape.preset(name)
    linear, quadratic = our_flops(shape)
    assert fwd_flops(shape).quadratic < quadratic
    assert_flops((linear - router(shape), quadratic), megatron_flops(shape))


@pytest.mark.parametrize("latent", [0, 512])
@pytest.mark.parametrize("gated", [True, False])
def test_shared_experts_and_latent_experts_agree_but_for_the_router(latent: int, gated: bool) -> None:
    shape = replace(
        ModelShape.preset("Qwen3-30B-A3B"),
        moe_latent_size=latent,
        moe_shared_expert_intermediate_size=768,
        moe_layer_freq=(0, 1, 1) * 16,
        gated_linear_unit=gated,
    )
    linear, quadratic = our_flops(shape)
    assert_flops((linear - router(shape), quadratic), megatron_flops(shape))


@pytest.mark.parametrize("depths", [1, 2])
def test_megatron_adds_three_norms_to_each_mtp_depth(depths: int) -> None:
    shape = replace(ModelShape.preset("DeepSeek-V3"), mtp_num_layers=depths)
    linear, quadratic = our_flops(shape)
    known = -router(shape) + mla_norms(shape) + 6 * shape.hidden_size * depths
    assert_flops((linear + known, quadratic), megatron_flops(shape))


def test_megatron_takes_mamba_for_twice_as_wide_as_the_model() -> None:
    shape = ModelShape.preset("Nemotron-3-Nano-30B-A3B")
    linear, quadratic = our_flops(shape)
    # 84 heads of 64 are twice the hidden size; the model has 64, which Megatron uses for the heads' own columns.
    wide = fwd_flops(replace(shape, mamba_num_heads=84)).linear - fwd_flops(shape).linear
    known = wide - 2 * shape.hidden_size * 20 * count(shape, "mamba")
    assert known > 0
    assert_flops((linear - router(shape) + known, quadratic), megatron_flops(shape))


# The real parser -----------------------------------------------------------------------------------------------------

RUN = """--seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --global-batch-size 2 --lr 1e-4
    --train-iters 1 --tokenizer-type NullTokenizer --position-embedding-type rope --transformer-impl local
    --distributed-backend gloo --no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm"""

QWEN3_30B = """--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
    --group-query-attention --num-query-groups 4 --kv-channels 128 --swiglu --vocab-size 151936
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768"""

DEEPSEEK = """--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --swiglu
    --vocab-size 129280 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128
    --qk-pos-emb-head-dim 64 --v-head-dim 128 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048 --moe-layer-freq [0]*3+[1]*58"""

DEEPSEEK_SPARSE = f"""{DEEPSEEK} --experimental-attention-variant dsa --dsa-indexer-n-heads 64
    --dsa-indexer-head-dim 128 --dsa-indexer-topk 2048"""

QWEN3_NEXT = """--num-layers 48 --hidden-size 2048 --ffn-hidden-size 5120 --num-attention-heads 16
    --group-query-attention --num-query-groups 2 --kv-channels 256 --attention-output-gate --swiglu
    --vocab-size 151936 --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512
    --moe-shared-expert-intermediate-size 512 --experimental-attention-variant gated_delta_net
    --linear-attention-freq 4"""

GPT_OSS = """--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --kv-channels 64 --quick-geglu --vocab-size 201088
    --num-experts 32 --moe-router-topk 4 --window-size 127,0 --window-attn-skip-freq 2"""

NEMOTRON = """--hidden-size 4096 --ffn-hidden-size 21504 --num-attention-heads 32 --group-query-attention
    --num-query-groups 8 --kv-channels 128 --squared-relu --vocab-size 131072
    --hybrid-layer-pattern M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"""


def parse(monkeypatch: pytest.MonkeyPatch, text: str) -> Namespace:
    from megatron.training import arguments

    monkeypatch.setattr(sys, "argv", ["train", *RUN.split(), *text.split()])
    return arguments.parse_args()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen3-30B-A3B", QWEN3_30B),
        ("DeepSeek-V3", DEEPSEEK),
        ("DeepSeek-V3.2", DEEPSEEK_SPARSE),
        ("Qwen3-Next-80B-A3B", QWEN3_NEXT),
        ("gpt-oss-20b", GPT_OSS),
        ("Nemotron-H-8B", NEMOTRON),
    ],
)
def test_the_real_parser_gives_the_preset(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    args = parse(monkeypatch, text)
    expected = fwd_flops(ModelShape.preset(name))
    assert fwd_flops(ModelShape.from_megatron_args(args)) == expected


def test_the_defaults_of_validate_args_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "--num-layers 4 --hidden-size 96 --num-attention-heads 4 --swiglu --num-experts 4 --moe-layer-freq 2"
    from megatron.training import arguments

    args = parse(monkeypatch, text + " --moe-router-topk 2 --vocab-size 1000")
    before = ModelShape.from_megatron_args(args)
    arguments.validate_args(args)
    assert ModelShape.from_megatron_args(args) == before
    assert (before.ffn_hidden_size, before.kv_channels, before.moe_ffn_hidden_size) == (256, 24, 256)
    assert before.padded_vocab_size == 1024
