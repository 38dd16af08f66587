"""Adds the cost of receiving keys and values to a run's cost model: measured (`--balance-cost`), or from a link.

One value serves a run: that between nodes where a context-parallel group may reach over several, else that within a
node. Megatron numbers ranks with tensor parallelism innermost, then context, then data parallelism, and torchrun puts
consecutive ranks on a node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.communication import (
    ASSUMED_TFLOPS,
    BETWEEN_NODES,
    WITHIN_NODE,
    exchange_flops_per_token,
)
from megatron_balance.cost.model import CostModel
from megatron_balance.model.shape import ModelShape


@dataclass(frozen=True)
class ExchangeCost:
    """The cost of a run's exchange.

    Attributes:
        cost_model: with `cp_exchange`.
        source: where the value comes from, for the log.
    """

    cost_model: CostModel
    source: str


def exchange_cost(
    cost_model: CostModel, *, args: Any, max_cp_size: int | None, calibration: Calibration | None
) -> ExchangeCost:
    """Add the exchange to a run's cost model.

    Args:
        cost_model: FLOPs, or the seconds of `--balance-cost`.
        args: Megatron's arguments.
        max_cp_size: the largest context-parallel size, None for as large as the ranks allow.
        calibration: of `--balance-cost`, None where it counts FLOPs.

    Raises:
        BalanceError: the model has layers that are not split by a ring of keys and values.
    """
    between = spans_nodes(args, max_cp_size=max_cp_size)
    where = "between nodes" if between else "within a node"
    if calibration is not None and calibration.cp_exchange is not None:
        # The file is of all heads; each tensor-parallel rank receives its own.
        measured = calibration.cost_model(model_parallel_size=args.tensor_model_parallel_size).cp_exchange
        cost_model = replace(cost_model, cp_exchange=measured)
        return ExchangeCost(cost_model, f"{_part(cost_model)}, measured in the run of --balance-cost")
    link = BETWEEN_NODES if between else WITHIN_NODE
    assumed = exchange_flops_per_token(
        ModelShape.from_megatron_args(args),
        bytes_per_second=link,
        # FLOPs at the second rate are attoseconds.
        tflops=UNITS_PER_SECOND / 1e12 / args.tensor_model_parallel_size if calibration else ASSUMED_TFLOPS,
        bytes_per_number=2 if args.bf16 or args.fp16 else 4,
        recompute=args.recompute_granularity == "full",
    )
    cost_model = replace(cost_model, cp_exchange=assumed)
    source = (
        f"{_part(cost_model)}, of which attention hides what it can, assumed from {link / 1e9:g} GB/s {where}"
        f"{'' if calibration else f' and {ASSUMED_TFLOPS:g} TFLOP/s'}; megatron-balance fit "
        "measures it in a run with --balance-context-parallel"
    )
    return ExchangeCost(cost_model, source)


def spans_nodes(args: Any, *, max_cp_size: int | None) -> bool:
    """True if a context-parallel group may have ranks on several nodes.

    Args:
        args: Megatron's arguments.
        max_cp_size: the largest context-parallel size, None for as large as the ranks allow.
    """
    # Reading flags loads no torch, and the package of this module does.
    from megatron_balance.runtime.nodes import blocks_span_nodes, local_world_size

    tp_size = args.tensor_model_parallel_size
    ranks_of_stage = args.world_size // args.pipeline_model_parallel_size
    largest = min(ranks_of_stage // tp_size, max_cp_size or ranks_of_stage)
    ranks_of_group = tp_size << (largest.bit_length() - 1)
    here = local_world_size()
    if here is not None and args.world_size <= here:
        return False
    # Where groups do not divide a stage, it is not said here which ranks they have.
    return bool(ranks_of_stage % ranks_of_group) or blocks_span_nodes(
        ranks_of_group, world_size=args.world_size, ranks_per_node=here
    )


def _part(cost_model: CostModel) -> str:
    linear = cost_model.linear + cost_model.expert_linear
    return f"{cost_model.cp_exchange / linear:.2%} of a token's linear cost" if linear else "all that a token costs"
