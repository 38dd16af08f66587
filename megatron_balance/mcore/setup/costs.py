"""The cost of a sample in a run: tokens, the FLOPs of its model, or the seconds of `--balance-cost`.

Where context-parallel sizes differ, receiving keys and values counts too: as measured, or from a link. One value serves
a run: that between nodes where a context-parallel group may reach over several, else that within a node. Megatron
numbers ranks with tensor parallelism innermost, then context, then data parallelism, and torchrun puts consecutive
ranks on a node.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.communication import ASSUMED_TFLOPS, BETWEEN_NODES, WITHIN_NODE, exchange_flops_per_token
from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.cost.profiles import default_attention_rate
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology


@dataclass(frozen=True)
class Costs:
    """The cost model of a run.

    Attributes:
        cost_model: of a sample.
        name: `tokens`, `flops` or `seconds`.
        patch_values: numbers of a patch of the vision encoder; 0 where images cost nothing or a patch is not known.
        attention_rate: rate of attention over that of all else that FLOPs are weighed by; None for other costs.
        says, warns: lines for the log.
    """

    cost_model: CostModel
    name: str
    patch_values: int = 0
    attention_rate: float | None = None
    says: tuple[str, ...] = ()
    warns: tuple[str, ...] = ()


def costs_of_run(
    flags: Namespace,
    *,
    config: Any,
    topology: Topology,
    shape: Callable[[], ModelShape],
    num_experts: int,
    seq_length: int,
    given: CostModel | None = None,
    by_flops: bool | None = None,
) -> Costs:
    """The costs that balance flags choose; a flag that a namespace lacks counts as not given.

    `config` is Megatron's arguments or a TransformerConfig, which share names; `given` a cost of a sample in place of
    FLOPs; `by_flops` stands in for `--balance-by-flops`. A file that cannot be read, or a model whose FLOPs are not
    known, raises BalanceError.
    """
    counts_exchange = topology.dynamic_cp
    if not (getattr(flags, "balance_by_flops", False) if by_flops is None else by_flops):
        source = "not counted beside tokens: add --balance-by-flops"
        return Costs(CostModel.tokens(), "tokens", says=_exchange_line(source) if counts_exchange else ())
    file = getattr(flags, "balance_cost", None)
    says: tuple[str, ...] = ()
    warns: tuple[str, ...] = ()
    calibration = rate = None
    if file is not None:
        calibration = Calibration.read(Path(file))
        # Where sizes differ, the planner shares a sample's cost among its context-parallel ranks itself.
        cp_size = 1 if counts_exchange else topology.cp_size
        sharing = topology.tp_size * cp_size
        cost_model = calibration.cost_model(ep_size=topology.ep_size, model_parallel_size=sharing)
        if notice := calibration.extrapolation(seq_length):
            warns = (f"--balance-cost {file}: {notice}",)
    elif given is not None:
        cost_model = given
    else:
        rate, reason = _attention_rate(flags, has_experts=bool(num_experts), fp8=bool(getattr(config, "fp8", None)))
        says = (f"FLOPs count attention at {rate:g} times the rate of all else: {reason}.",)
        cap = getattr(flags, "max_tokens_per_gpu", None)
        cost_model = CostModel.from_shape(
            shape(),
            ep_size=topology.ep_size,
            recompute=config.recompute_granularity == "full",
            microbatch_tokens=MICROBATCH_TOKENS,
            frozen_encoder=bool(getattr(config, "freeze_ViT", False)),
            frozen_language_model=bool(getattr(config, "freeze_LM", False)),
            pack_tokens=cap * topology.cp_size if isinstance(cap, int) else 0,
            attention_tflops=rate,
        )
    vision = shape().vision if cost_model.image_linear and given is None else None
    if counts_exchange:
        cost_model, source = _with_exchange(
            cost_model, config=config, topology=topology, shape=shape, calibration=calibration
        )
        says = (*_exchange_line(source), *says)
    else:
        cost_model = replace(cost_model, cp_exchange=0)
    name = "flops" if file is None else "seconds"
    return Costs(cost_model, name, 0 if vision is None else vision.patch_values, rate, says, warns)


def _exchange_line(source: str) -> tuple[str, ...]:
    return (f"receiving a token's keys and values from context-parallel ranks: {source}.",)


def _attention_rate(flags: Namespace, *, has_experts: bool, fp8: bool) -> tuple[float, str]:
    """The rate of attention over that of all else that FLOPs are weighed by, and its reason."""
    given = getattr(flags, "balance_attention_rate", None)
    if given is not None:
        return given, "--balance-attention-rate"
    kind, precision = "mixtures of experts" if has_experts else "dense models", "FP8" if fp8 else "bf16"
    rate = default_attention_rate(has_experts=has_experts, fp8=fp8)
    return rate, f"what loses least over published GPUs for {kind} in {precision}; --balance-attention-rate sets it"


def _with_exchange(
    cost_model: CostModel,
    *,
    config: Any,
    topology: Topology,
    shape: Callable[[], ModelShape],
    calibration: Calibration | None,
) -> tuple[CostModel, str]:
    """The cost model with the exchange of keys and values, and where its value comes from."""
    between = _spans_nodes(topology)
    if calibration is not None and calibration.cp_exchange is not None:
        # The file is of all heads; each tensor-parallel rank receives its own.
        measured = calibration.cost_model(model_parallel_size=topology.tp_size).cp_exchange
        cost_model = replace(cost_model, cp_exchange=measured)
        return cost_model, f"{_part(cost_model)}, measured in the run of --balance-cost"
    link, where = (BETWEEN_NODES, "between nodes") if between else (WITHIN_NODE, "within a node")
    assumed = exchange_flops_per_token(
        shape(),
        bytes_per_second=link,
        # FLOPs at the second rate are attoseconds.
        tflops=UNITS_PER_SECOND / 1e12 / topology.tp_size if calibration else ASSUMED_TFLOPS,
        bytes_per_number=2 if config.bf16 or config.fp16 else 4,
        recompute=config.recompute_granularity == "full",
    )
    cost_model = replace(cost_model, cp_exchange=assumed)
    return cost_model, (
        f"{_part(cost_model)}, of which attention hides what it can, assumed from {link / 1e9:g} GB/s {where}"
        f"{'' if calibration else f' and {ASSUMED_TFLOPS:g} TFLOP/s'}; megatron-balance fit "
        "measures it in a run with --balance-context-parallel"
    )


def _spans_nodes(topology: Topology) -> bool:
    """True if a context-parallel group may have ranks on several nodes."""
    # Reading flags loads no torch, and the package of this module does.
    from megatron_balance.runtime.process import blocks_span_nodes, local_world_size

    ranks_of_stage = topology.num_leaves * topology.tp_size
    ranks_of_group = topology.tp_size * topology.dynamic_cp_sizes[-1]
    world_size, here = ranks_of_stage * topology.pp_size, local_world_size()
    if here is not None and world_size <= here:
        return False
    # Where groups do not divide a stage, it is not said here which ranks they have.
    return bool(ranks_of_stage % ranks_of_group) or blocks_span_nodes(
        ranks_of_group, world_size=world_size, ranks_per_node=here
    )


def _part(cost_model: CostModel) -> str:
    linear = cost_model.linear + cost_model.expert_linear
    return f"{cost_model.cp_exchange / linear:.2%} of a token's linear cost" if linear else "all that a token costs"
