"""The cost models that the ablation plans with.

Rows of other systems count as those systems do, written from their description. Only what they count differs:
the same planner makes every plan.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.planner.baselines.equal_size_kk import LINEAR
from benchmarks.planner.setups import Setup
from megatron_balance import CostModel, ModelShape
from megatron_balance.cost.model import MICROBATCH_TOKENS


def slime_approximate(shape: ModelShape) -> CostModel:
    """`coeff*L + L²` with `coeff = 2h + e*d_ff/2`, e 3 with a gated unit, else 2.

    Source: slime pull request 2017, first version. It is `8h²L + 2e*h*d_ff*L + 4hL²` over `4h`: four projections
    of h x h, attention that computes the masked half as well, no output layer. In a MoE model `d_ff` is the
    width a token visits: the chosen experts' and the shared ones'. Every layer has full attention.
    """
    gemms = 3 if shape.gated_linear_unit else 2
    return CostModel(linear=2 * shape.hidden_size + gemms * _visited_width(shape) // 2, quadratic=1)


def slime_counter(shape: ModelShape) -> CostModel:
    """slime's `calculate_fwd_flops`: forward FLOPs, all layers equal.

    Source: slime, `slime/utils/flops_utils.py`. Per token: queries `2h*nd`, keys and values `2h*(n/g)*d`, where
    this package has `4h*gd`; output projection `2h²`, which is right where `nd` is h; three GEMMs in the MLP,
    gated or not; no router; output layer `2hV`. Core `2nd*L²` in every layer, linear attention or not.

    Raises:
        ValueError: the model has multi-latent attention, which no setup here has.
    """
    if shape.multi_latent_attention:
        raise ValueError("slime's counter is written for grouped-query attention here: choose another model")
    h, d = shape.hidden_size, shape.kv_channels
    n, g = shape.num_attention_heads, shape.num_query_groups
    layer = 2 * h * n * d + 2 * h * (n // g) * d + 2 * h * h + 6 * h * _visited_width(shape)
    return CostModel(
        linear=shape.num_layers * layer + 2 * h * shape.padded_vocab_size, quadratic=shape.num_layers * 2 * n * d
    )


def verl_fixed() -> CostModel:
    """`24576 L + L²`, whatever the model. Source: verl, `verl/utils/seqlen_balancing.py`."""
    return CostModel(linear=LINEAR, quadratic=1)


def _visited_width(shape: ModelShape) -> int:
    """Width of the MLP that a token goes through."""
    if not shape.num_experts:
        return shape.ffn_hidden_size
    return shape.moe_router_topk * shape.moe_ffn_hidden_size + shape.moe_shared_expert_intermediate_size


CostWay = Callable[[ModelShape, Setup], CostModel]

COST_WAYS: dict[str, CostWay] = {
    "tokens": lambda shape, setup: CostModel.tokens(),
    "coeff*L + L², coeff as slime first had it": lambda shape, setup: slime_approximate(shape),
    "slime's FLOPs": lambda shape, setup: slime_counter(shape),
    "24576 L + L² (verl)": lambda shape, setup: verl_fixed(),
    "FLOPs, all on the sample's rank": lambda shape, setup: CostModel.from_shape(shape),
    "FLOPs": lambda shape, setup: CostModel.from_shape(shape, ep_size=setup.topology.ep_size),
    f"FLOPs and {MICROBATCH_TOKENS} tokens a micro-batch": lambda shape, setup: CostModel.from_shape(
        shape, ep_size=setup.topology.ep_size, microbatch_tokens=MICROBATCH_TOKENS
    ),
}
"""The last is what this package plans with; the first of FLOPs does not know that an expert-parallel group shares its
experts, the next holds micro-batches for free."""
