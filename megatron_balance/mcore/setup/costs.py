"""The cost of a sample in a run: tokens, the FLOPs of its model, or the seconds of `--balance-cost`.

Where context-parallel sizes differ, receiving keys and values counts too: as measured, or from a link. One value serves
a run: that between nodes where a context-parallel group may reach over several, else that within a node. Megatron
numbers ranks with tensor parallelism innermost, then context, then data parallelism, and torchrun puts consecutive
ranks on a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.cost.rates import (
    ASSUMED_TFLOPS,
    BETWEEN_NODES,
    WITHIN_NODE,
    default_attention_rate,
    exchange_flops_per_token,
)
from megatron_balance.mcore.options import Options
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class Costs:
    """The cost model of a run, its name and lines for the log.

    `patch_values` are the numbers of a patch of the vision encoder, 0 where images cost nothing or a patch is not
    known; `attention_rate` is that which FLOPs are weighed by, None for other costs.
    """

    model: CostModel
    name: str = "tokens"
    patch_values: int = 0
    attention_rate: float | None = None
    says: tuple[str, ...] = field(default=(), repr=False)
    warns: tuple[str, ...] = field(default=(), repr=False)


def costs_of(
    options: Options, *, topology: Topology, shape: Callable[[], ModelShape], given: CostModel | None = None
) -> Costs:
    """The costs that balance flags choose; `given` is one in place of FLOPs."""
    exchange, by_cp = 0, "receiving a token's keys and values from context-parallel ranks"
    if not options.get("balance_by_flops"):
        line = f"{by_cp}: not counted beside tokens: add --balance-by-flops."
        return Costs(CostModel.tokens(), says=(line,) if topology.dynamic_cp else ())
    name, file = "flops", options.get("balance_cost")
    says: tuple[str, ...] = ()
    warns: tuple[str, ...] = ()
    calibration = rate = None
    if file is not None:
        name, calibration = "seconds", Calibration.read(Path(file))
        # Where sizes differ, the planner shares a sample's cost among its context-parallel ranks itself.
        sharing = topology.tp_size * (1 if topology.dynamic_cp else topology.cp_size)
        cost_model = calibration.cost_model(ep_size=topology.ep_size, model_parallel_size=sharing)
        if notice := calibration.extrapolation(options.get("seq_length") or 0):
            warns = (f"--balance-cost {file}: {notice}",)
    elif given is not None:
        cost_model = given
    else:
        rate, reason = _attention_rate(options)
        says = (f"FLOPs count attention at {rate:g} times the rate of all else: {reason}.",)
        cost_model = CostModel.from_shape(
            shape(),
            ep_size=topology.ep_size,
            recompute=options.get("recompute_granularity") == "full",
            microbatch_tokens=MICROBATCH_TOKENS,
            pack_tokens=(options.get("max_tokens_per_gpu") or 0) * topology.cp_size,
            attention_tflops=rate,
        )
    vision = shape().vision if cost_model.image_linear and given is None else None
    if topology.dynamic_cp:
        exchange, source = _exchange(options, topology=topology, shape=shape, calibration=calibration)
        linear = cost_model.linear + cost_model.expert_linear
        part = f"{exchange / linear:.2%} of a token's linear cost" if linear else "all that a token costs"
        says = (f"{by_cp}: {part}, {source}.", *says)
    cost_model = replace(cost_model, cp_exchange=exchange)
    return Costs(cost_model, name, 0 if vision is None else vision.patch_values, rate, says, warns)


def _attention_rate(options: Options) -> tuple[float, str]:
    """The rate of attention over that of all else that FLOPs are weighed by, and its reason."""
    given = options.get("balance_attention_rate")
    if given is not None:
        return given, "--balance-attention-rate"
    has_experts, fp8 = bool(options.get("num_experts")), bool(options.get("fp8"))
    kind, precision = "mixtures of experts" if has_experts else "dense models", "FP8" if fp8 else "bf16"
    rate = default_attention_rate(has_experts=has_experts, fp8=fp8)
    return rate, f"what loses least over published GPUs for {kind} in {precision}; --balance-attention-rate sets it"


def _exchange(
    options: Options, *, topology: Topology, shape: Callable[[], ModelShape], calibration: Calibration | None
) -> tuple[int, str]:
    """The cost of receiving a token's keys and values, and where it comes from."""
    if calibration is not None and calibration.costs.cp_exchange:
        # The file is of all heads; each tensor-parallel rank receives its own.
        measured = calibration.cost_model(model_parallel_size=topology.tp_size).cp_exchange
        return measured, "measured in the run of --balance-cost"
    # Reading flags loads no torch, and the package of this module does.
    from megatron_balance.runtime.process import local_world_size

    here, ranks_of_group = local_world_size() or 1, topology.tp_size * topology.dynamic_cp_sizes[-1]
    spans_nodes = topology.num_leaves * topology.tp_size * topology.pp_size > here and here % ranks_of_group
    link, where = (BETWEEN_NODES, "between nodes") if spans_nodes else (WITHIN_NODE, "within a node")
    assumed = exchange_flops_per_token(
        shape(),
        bytes_per_second=link,
        # FLOPs at the second rate are attoseconds.
        tflops=UNITS_PER_SECOND / 1e12 / topology.tp_size if calibration else ASSUMED_TFLOPS,
        bytes_per_number=2 if options.get("bf16") or options.get("fp16") else 4,
        recompute=options.get("recompute_granularity") == "full",
    )
    return assumed, (
        f"of which attention hides what it can, assumed from {link / 1e9:g} GB/s {where}"
        f"{'' if calibration else f' and {ASSUMED_TFLOPS:g} TFLOP/s'}; megatron-balance fit "
        "measures it in a run with --balance-context-parallel"
    )
