"""Loss from a wrong cost model: plans made with one, timed by another (the ablation of slime's pull request 2017).

Only the cost model differs: this package's planner makes every plan. Models of other systems count as those systems do,
written from their description. The truth is an assumed device: it runs GEMMs at 400 TFLOP/s, attention at twice, once,
half or a third of that speed, and takes 0.3 ms a layer for every micro-batch (some 60 kernels of 5 µs) and 5 µs a layer
for every sequence. The loss is the step time of a plan over that of the plan made with the truth, less one; it can be a
little below zero, as neither plan is perfect.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.setups import SETUPS, Setup, global_batches
from benchmarks.planner.wheels import LINEAR
from megatron_balance import CostModel, DataSchedule, ModelShape, build_data_schedule
from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.model import MICROBATCH_TOKENS
from megatron_balance.planner import schedule_metrics

ABLATED_SETUPS = SETUPS[:6]
"""The four of slime's pull request, and 32 ranks with and without experts over them."""

GEMM_SECONDS = 1 / 400e12
"""Of a FLOP: what a large bf16 GEMM reaches on a current accelerator."""

DEVICES = {
    "attention at twice GEMM speed": 1 / 2,
    "attention at GEMM speed": 1,
    "attention at half GEMM speed": 2,
    "attention at a third of GEMM speed": 3,
}
"""Name → seconds of a FLOP of attention, in those of a GEMM. Nothing here is measured."""


@dataclass(frozen=True)
class Loss:
    """One cost model on one setup, over all length sets and devices."""

    way: str
    setup: str
    mean: float
    worst: float


def measure_losses(setups: Sequence[Setup], *, lengths_folder: Path | None) -> Iterator[Loss]:
    """Plans every batch of every setup with every cost model, and times the plans on every device."""
    for setup in setups:
        batches = list(global_batches(setup, lengths_folder=lengths_folder))
        truths = [true_cost_model(setup, attention=attention) for attention in DEVICES.values()]
        best = [[_time(_plan(batch, setup=setup, cost_model=truth), truth) for batch in batches] for truth in truths]
        for way, make in COST_WAYS.items():
            # A plan does not depend on the device that judges it.
            plans = [
                _plan(batch, setup=setup, cost_model=make(ModelShape.preset(setup.model), setup)) for batch in batches
            ]
            losses = [
                _time(plan, truth) / least - 1
                for truth, of_device in zip(truths, best, strict=True)
                for plan, least in zip(plans, of_device, strict=True)
            ]
            yield Loss(way, setup.name, mean=statistics.fmean(losses), worst=max(losses))


def true_cost_model(setup: Setup, *, attention: float) -> CostModel:
    """Times of a sample on a device, tokens and heads spread over the setup's model-parallel ranks."""
    shape, topology = ModelShape.preset(setup.model), setup.topology
    # With an expert-parallel group of two the routed experts' part is kept apart.
    flops = CostModel.from_shape(shape, ep_size=2)
    core = GEMM_SECONDS * attention
    return Calibration(
        per_microbatch=0.3e-3 * shape.num_layers,
        per_sequence=5e-6 * shape.num_layers,
        linear=GEMM_SECONDS * flops.linear,
        expert_linear=GEMM_SECONDS * flops.expert_linear,
        quadratic=core * flops.quadratic,
        windows=tuple((window, core * coefficient) for window, coefficient in flops.windows),
    ).cost_model(ep_size=topology.ep_size, model_parallel_size=topology.tp_size * topology.cp_size)


def _plan(batch: NDArray[np.int64], *, setup: Setup, cost_model: CostModel) -> DataSchedule:
    return build_data_schedule(batch, cost_model=cost_model, topology=setup.topology, limits=setup.limits)


def _time(plan: DataSchedule, truth: CostModel) -> float:
    return schedule_metrics(plan, cost_model=truth).predicted_cost


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
