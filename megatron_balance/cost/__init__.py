"""The cost of a sample: from FLOPs, from measured seconds, from tokens; and of context-parallel communication."""

from megatron_balance.cost.calibration import Calibration, fit_seconds
from megatron_balance.cost.model import MAX_TOTAL_COST, MICROBATCH_TOKENS, CostModel
from megatron_balance.cost.rates import (
    ATTENTION_RATES,
    BETWEEN_NODES,
    exchange_flops_per_token,
    find_profile,
    profiles,
    resolve_cost,
)

__all__ = [
    "ATTENTION_RATES",
    "BETWEEN_NODES",
    "MAX_TOTAL_COST",
    "MICROBATCH_TOKENS",
    "Calibration",
    "CostModel",
    "exchange_flops_per_token",
    "find_profile",
    "fit_seconds",
    "profiles",
    "resolve_cost",
]
