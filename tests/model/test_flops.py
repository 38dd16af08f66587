"""FLOPs by hand, and against a plain count of the GEMMs that shares no code with the package."""

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from megatron_balance import BalanceError, CostModel, ModelShape, calculate_fwd_flops
from megatron_balance.model.flops import FlopsPolynomial, Layer, fwd_flops, fwd_flops_by_part, image_flops
from megatron_balance.model.hf_config import PRESETS
from megatron_balance.model.vision import VisionEncoder

DENSE = ModelShape(
    hidden_size=8,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=3,
    ffn_hidden_size=16,
    padded_vocab_size=10,
    gated_linear_unit=True,
)
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 5,
    "kv_lora_rank": 6,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
}
MLA = replace(DENSE, **LATENT)
INDEXER = {"dsa_indexer_n_heads": 3, "dsa_indexer_head_dim": 4, "dsa_indexer_topk": 5}
SPARSE = replace(MLA, **INDEXER)
EXPERTS = {"num_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 12}
MAMBA = {"mamba_state_dim": 2, "mamba_head_dim": 3, "mamba_num_groups": 2, "mamba_num_heads": 4}


def gemm(*sizes):
    """A product of an m x n by an n x k matrix."""
    m, n, k = sizes
    return 2 * m * n * k


# By hand -------------------------------------------------------------------------------------------------------------


def part(shape, name):
    """Of one layer of its two."""
    flops = fwd_flops_by_part(shape)[name]
    windows = tuple((window, coefficient // 2) for window, coefficient in flops.windows)
    return FlopsPolynomial(flops.linear // 2, flops.quadratic // 2, flops.expert_linear // 2, windows)


def test_sparse_attention_by_hand():
    length, topk = 11, 5
    projections = gemm(length, 5, 3 * 4) + gemm(length, 8, 4) + gemm(length, 8, 3)
    # All heads share one latent key and value: QKᵀ on 6 + 2 channels, PV on 6; a query picks from what is before it.
    picked = sum(min(position + 1, topk) for position in range(length))
    core = picked * 4 * (gemm(1, 6 + 2, 1) + gemm(1, 1, 6))
    scores = 3 * gemm(length, 4, length) // 2
    assert part(SPARSE, "dsa_indexer")(length) == projections + scores
    assert part(SPARSE, "dsa")(length) == part(MLA, "mla").linear * length + core
    more = gemm(1, 8, 12) - gemm(1, 5, 12)
    without_lora = part(replace(SPARSE, q_lora_rank=0), "dsa_indexer").linear
    assert without_lora == part(SPARSE, "dsa_indexer").linear + more


def test_torch_counts_the_same_pairs_in_megatrons_sparse_attention():
    """Its unfused functions compute the masked half of all pairs as well, of the whole pack."""
    torch = pytest.importorskip("torch")
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    from torch.utils.flop_counter import FlopCounterMode

    tokens, topk = 12, 5
    keys, weights = torch.randn(tokens, 1, 4), torch.randn(tokens, 1, 3)
    with FlopCounterMode(display=False) as counter:
        _, picked = dsa.fused_qk_topk_naive(torch.randn(tokens, 1, 3, 4), keys, weights, topk)
    assert counter.get_total_flops() == 2 * part(SPARSE, "dsa_indexer").quadratic * tokens**2
    causal = torch.full((tokens, tokens), float("-inf")).triu(1)
    latent = torch.randn(tokens, 1, 1, 6 + 2)
    with FlopCounterMode(display=False) as counter:
        dsa._unfused_absorbed_dsa_fn(torch.randn(tokens, 1, 4, 8), latent, picked, 1.0, 6, mask=causal)
    ((_, core),) = part(SPARSE, "dsa").windows
    assert counter.get_total_flops() == 2 * core * tokens**2


# What training costs -------------------------------------------------------------------------------------------------


def test_an_indexer_runs_forward_alone():
    indexer, sparse = fwd_flops_by_part(SPARSE)["dsa_indexer"], fwd_flops(SPARSE)
    cost = CostModel.from_shape(SPARSE)
    assert cost.quadratic == indexer.quadratic
    assert cost.linear == 3 * sparse.linear - 2 * indexer.linear
    assert cost.windows == ((5, 7 * sparse.windows[0][1] // 2),)


def test_frozen_weights_under_lora_run_twice():
    cost, full = CostModel.from_shape(replace(DENSE, lora_rank=4)), CostModel.from_shape(DENSE)
    assert (3 * cost.linear, cost.quadratic) == (2 * full.linear, full.quadratic)


# Properties ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_the_polynomial_is_the_sum_over_layers_and_sequences(name):
    """R41: a workload by the polynomial is the exact one."""
    shape, seqlens = ModelShape.preset(name), [0, 1, 127, 128, 129, 5000]
    flops = fwd_flops(shape)
    expected = 0
    for length in seqlens:
        pairs = sum(
            c * (2 * sum(min(p + 1, w) for p in range(length)) if w < length else length**2) for w, c in flops.windows
        )
        expected += (flops.linear + flops.expert_linear) * length + flops.quadratic * length**2 + pairs
    assert calculate_fwd_flops(seqlens, shape) == expected
    assert sum(part(length) for part in fwd_flops_by_part(shape).values() for length in seqlens) == expected


def test_lengths_of_numpy_do_not_overflow():
    shape = ModelShape.preset("Qwen2.5-72B")
    lengths = np.array([8192, 8192], dtype=np.int32)
    assert calculate_fwd_flops(lengths.tolist(), shape) == calculate_fwd_flops(lengths, shape)
    assert calculate_fwd_flops([2**31], shape) > 2**63


# Shapes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"num_layers": True}, "num_layers is True"),
        ({"lora_rank": -1}, "lora_rank is -1"),
        ({"num_query_groups": 3}, "num_query_groups is 3: it must divide num_attention_heads, 4"),
        ({"num_experts": 4}, "moe_router_topk is 0: a moe layer needs it"),
        ({**EXPERTS, "moe_router_topk": 7}, "moe_router_topk is 7.*num_experts, 6"),
        ({**EXPERTS, "moe_layer_freq": (1,)}, r"moe_layer_freq is \(1,\).*2 layers"),
        ({"linear_attention_freq": (0, 1)}, "linear_key_head_dim is 0: a gated_delta_net layer"),
        ({"window_size": (-2, 0)}, r"window_size is \(-2, 0\)"),
        ({"dsa_indexer_topk": 5}, "dsa_indexer_topk is 5: .* without multi_latent_attention"),
        ({**LATENT, "dsa_indexer_topk": 5}, "dsa_indexer_n_heads is 0: a dsa layer needs it"),
        ({"hybrid_layer_pattern": "X*"}, "hybrid_layer_pattern is 'X.'.*whose FLOPs are known"),
        ({"hybrid_layer_pattern": "*-/*"}, r"have \(2, 0\) layers, depths"),
        ({"hybrid_layer_pattern": "M-"}, "mamba_state_dim is 0: a mamba layer"),
    ],
)
def test_a_shape_that_cannot_be_is_refused(change, message):
    with pytest.raises(BalanceError, match=message):
        replace(DENSE, **change)


def test_hybrid_patterns_follow_megatrons_symbols():
    shape = replace(
        DENSE,
        **MAMBA,
        **EXPERTS,
        num_layers=4,
        hybrid_layer_pattern="M-|*E/*-/*-",
        mtp_num_layers=2,
        window_size=(1, 0),
    )
    depth = (Layer("attention", None, 2), Layer(None, "dense"))
    assert shape.layers() == (
        Layer("mamba", None),
        Layer(None, "dense"),
        Layer("attention", None, 2),
        Layer(None, "moe"),
        *depth,
        *depth,
    )


# Megatron's arguments, without Megatron ------------------------------------------------------------------------------

ARGS = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "padded_vocab_size": 128,
    "num_query_groups": 1,
    "group_query_attention": False,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": None}, "--num-layers is not given"),
        ({"padded_vocab_size": None}, "--vocab-size is not given"),
        ({"experimental_attention_variant": "gated_delta_net"}, "--linear-attention-freq is not given"),
        ({"experimental_attention_variant": "kda"}, "--experimental-attention-variant is 'kda'"),
        ({"heterogeneous_layers_config_path": "x.json"}, "--heterogeneous-layers-config-path is given"),
    ],
)
def test_arguments_that_cannot_be_counted_are_refused(change, message):
    with pytest.raises(BalanceError, match=message):
        ModelShape.from_megatron_args(Namespace(**{**ARGS, **change}))


# Images --------------------------------------------------------------------------------------------------------------

QWEN = ModelShape.preset("Qwen2.5-VL-7B")


def test_flops_of_images_are_added():
    of_image = image_flops(QWEN)
    flops = fwd_flops(QWEN)
    assert calculate_fwd_flops([10, 30], QWEN, image_patches=[64, 256]) == (
        flops(10) + flops(30) + of_image(64) + of_image(256)
    )
    with pytest.raises(BalanceError, match=r"ModelShape\.vision is None"):
        calculate_fwd_flops([10], ModelShape.preset("Qwen3-8B"), image_patches=[64])


def image_cost(model):
    """Of an image of 1,000 patches."""
    scaled = model.sample_costs(np.array([1]), image_patches=np.array([[1000, 1000**2]]))
    assert scaled.shift == 0
    return int(scaled.image_costs[0, 0])


@pytest.mark.parametrize(("frozen", "gemms", "half_cores"), [(False, 3, 7), (True, 1, 2)])
def test_training_takes_gemms_three_times_and_attention_three_and_a_half(frozen, gemms, half_cores):
    flops = image_flops(QWEN)
    cost = image_cost(CostModel.from_shape(QWEN, frozen_encoder=frozen))
    assert cost == gemms * flops.linear * 1000 + half_cores * flops.quadratic * 10**6 // 2
    assert image_cost(CostModel.from_shape(ModelShape.preset("Qwen2.5-7B"))) == 0


def test_a_nested_config_has_the_same_encoder():
    flat = PRESETS["Qwen2.5-VL-7B"]
    text = {key: value for key, value in flat.items() if key != "vision_config"} | {"model_type": "qwen2_5_vl_text"}
    nested = {"model_type": "qwen2_5_vl", "text_config": text, "vision_config": flat["vision_config"]}
    assert ModelShape.from_hf_config(nested) == ModelShape.from_hf_config(flat)
    with pytest.raises(BalanceError, match=r"spatial_merge_size is missing.*'qwen2_5_vl'"):
        ModelShape.from_hf_config(flat | {"vision_config": {"depth": 32}})


def test_sizes_of_an_encoder_are_checked():
    sizes = {
        "hidden_size": 8,
        "num_layers": 2,
        "ffn_hidden_size": 8,
        "gated_linear_unit": False,
        "patch_values": 12,
        "patches_per_token": 1,
    }
    with pytest.raises(BalanceError, match=r"VisionEncoder\.num_layers is 0"):
        VisionEncoder(**{**sizes, "num_layers": 0})
