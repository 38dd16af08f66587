"""FLOPs against Megatron's own formula.

Where Megatron's `num_floating_point_operations` is not what a model computes, the difference is asserted; it

- leaves out the router of a MoE layer, and the indexer of sparse attention;
- counts sliding windows and sparse attention as full attention;
- adds the norms of MLA's latent vectors and those of a multi-token-prediction depth, and no other norms;
- takes a Mamba layer for twice as wide as the model, whatever its heads.
"""

import sys
from dataclasses import replace

import pytest
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


def parse(monkeypatch, text):
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
def test_the_real_parser_gives_the_preset(monkeypatch, name, text):
    args = parse(monkeypatch, text)
    expected = fwd_flops(ModelShape.preset(name))
    assert fwd_flops(ModelShape.from_megatron_args(args)) == expected


def test_the_defaults_of_validate_args_are_ours(monkeypatch):
    text = "--num-layers 4 --hidden-size 96 --num-attention-heads 4 --swiglu --num-experts 4 --moe-layer-freq 2 "
    from megatron.training import arguments

    args = parse(monkeypatch, text + "--moe-router-topk 2 --vocab-size 1000 --no-rope-fusion")
    before = ModelShape.from_megatron_args(args)
    arguments.validate_args(args)
    assert ModelShape.from_megatron_args(args) == before
    assert (before.ffn_hidden_size, before.kv_channels, before.moe_ffn_hidden_size) == (256, 24, 256)
    assert before.padded_vocab_size == 1024
    config = arguments.core_transformer_config_from_args(args)
    assert ModelShape.from_transformer_config(config, padded_vocab_size=1024) == before
