"""Mixture of experts: how tokens reach their experts, and what is computed from how many went where."""

from __future__ import annotations

from megatron_balance.mcore.options.conditions import (
    among,
    both,
    experts_span_replicas,
    given,
)
from megatron_balance.mcore.options.option import Option, Support

EXPERTS = (
    Option(
        names=("moe_token_dispatcher_type", "expert_model_parallel_size"),
        case="allgather (the default), with experts spread over ranks that hold different micro-batches",
        support=Support.REFUSED,
        when=both(among("moe_token_dispatcher_type", "allgather"), experts_span_replicas),
        because="its all-gathers are of equal sizes, and ranks of a balanced run hold different numbers of tokens",
        remedy="set --moe-token-dispatcher-type alltoall",
    ),
    Option(
        names=("overlap_moe_expert_parallel_comm", "balance_calibrate_online"),
        case="with --balance-calibrate-online",
        support=Support.REFUSED,
        when=both(given("balance_calibrate_online"), given("overlap_moe_expert_parallel_comm")),
        because="forward and backward passes of micro-batches run together and cannot be told apart",
        remedy="use --balance-calibration",
    ),
)
