"""Collects the settings of a run on each rank, and compares them across ranks.

Ranks agree before any of them makes a process group (`runtime/agreement.py`). Ranks of a stock run take part too: a
rank cannot know that others balance.

Invariant: an error in the flags or files of one rank is raised on every rank of the world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from importlib import metadata
from typing import Any

import numpy as np

import megatron_balance
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import cautions, why_stock
from megatron_balance.mcore.setup.arguments import (
    BalanceConfig,
    attention_rate_of,
    cost_model_from_megatron_args,
    exchange_source,
    extrapolation_from_megatron_args,
    patch_values_from_megatron_args,
    topology_from_megatron_args,
)
from megatron_balance.mcore.setup.data_stages import loads_on_every_stage
from megatron_balance.mcore.setup.layout import meeting_of_world, problem_of_bound_device
from megatron_balance.runtime.agreement import agree
from megatron_balance.topology import Limits, Topology

PACKAGES = ("megatron-core", "torch", "numpy")
"""Packages whose other versions might plan or compute differently."""

MEGATRON_SETTINGS = (
    "train_iters",
    "global_batch_size",
    "rampup_batch_size",
    "micro_batch_size",
    "eval_global_batch_size",
    "eval_micro_batch_size",
    "seq_length",
    "seed",
    "dataloader_type",
    "log_interval",
    "sft",
    "full_validation",
    "multiple_validation_sets",
    "iteration",
    "consumed_train_samples",
)
"""Megatron's arguments that decide when ranks of this package meet, and on which samples."""


@dataclass(frozen=True)
class RunSetup:
    """The settings of a balanced run, read once from Megatron's arguments.

    Attributes:
        config: the flags.
        topology: the ranks.
        limits: of a micro-batch.
        cost_model: of a sample.
        patch_values: numbers of a patch of the vision encoder; 0 where that is not known.
        attention_rate: rate of attention over that of all else that FLOPs are weighed by, and its reason; None where
            costs are not the FLOPs of this package.
        exchange_source: where its cost of context-parallel exchange comes from, or None where all sizes are the same.
        extrapolation: a notice where samples may be longer than those that costs were measured on; else empty.
        timeout: of collectives.
        micro_batch_size: samples of an item.
        eval_micro_batch_size: samples of an item in evaluation.
        global_batch_size: samples of a step.
        log_interval: steps between log lines.
        resumed_from: the checkpoint folder and iteration that the run resumes from, or None. `--finetune` starts again
            from iteration 0, and so does not resume.
        first_sample: index in the data set of the first sample that the run loads, or None where the sampler's order is
            not known (any but `single`).
        evaluates: True if evaluation runs.
        sft: `--sft` is set.
        counts_router_tokens: MoE routers count tokens, for auxiliary losses or the expert bias.
        loads_on_every_stage: pipeline stages between the first and the last load data too.
        loads_on_every_tensor_rank: each rank of a tensor-parallel group may be given an iterator, as in a hand-written
            loop; otherwise the first one alone is.
        overlaps_passes: forward and backward passes run together, so that none can be timed.
    """

    config: BalanceConfig
    topology: Topology
    limits: Limits
    cost_model: CostModel
    patch_values: int
    attention_rate: tuple[float, str] | None
    exchange_source: str | None
    extrapolation: str
    timeout: timedelta
    micro_batch_size: int
    eval_micro_batch_size: int
    global_batch_size: int
    log_interval: int
    resumed_from: tuple[str, int] | None
    first_sample: int | None
    evaluates: bool
    sft: bool
    counts_router_tokens: bool
    loads_on_every_stage: bool
    loads_on_every_tensor_rank: bool
    overlaps_passes: bool

    @property
    def balances_evaluation(self) -> bool:
        """True if evaluation is balanced as well."""
        return self.evaluates and self.config.evaluation is not False and not self.stock_evaluation

    @property
    def stock_evaluation(self) -> str:
        """The reason for stock evaluation where no flag asks for it; empty where it is balanced or does not run."""
        if not self.evaluates or self.config.evaluation is not None:
            return ""
        if self.config.dynamic_cp:
            return "it runs at --context-parallel-size"
        if self.sft:
            return (
                "under --sft its loss is a mean of means of micro-batches, which other micro-batches would change. "
                "--balance-evaluation balances it, and divides the sum over tokens by the tokens"
            )
        return ""

    @classmethod
    def from_megatron_args(cls, args: Any, *, config: BalanceConfig) -> RunSetup:
        """Reads validated arguments.

        Raises:
            BalanceError: a file of --balance-cost that cannot be read, or a model whose FLOPs are not known.
        """
        topology = topology_from_megatron_args(args)
        cost_model = cost_model_from_megatron_args(args, config=config)
        counts_flops = config.cost_name == "flops" and getattr(args, "balance_cost_model", None) is None
        return cls(
            config,
            topology=topology,
            limits=config.limits(micro_batch_size=args.micro_batch_size, topology=topology),
            cost_model=cost_model,
            patch_values=patch_values_from_megatron_args(args, cost_model=cost_model),
            attention_rate=attention_rate_of(args) if counts_flops else None,
            exchange_source=exchange_source(args, config=config),
            extrapolation=extrapolation_from_megatron_args(args, config=config),
            timeout=timeout_of(args),
            micro_batch_size=args.micro_batch_size,
            # Megatron's from 0.18 on; a hand-written loop has none either.
            eval_micro_batch_size=getattr(args, "eval_micro_batch_size", None) or args.micro_batch_size,
            global_batch_size=args.global_batch_size,
            log_interval=args.log_interval,
            resumed_from=(args.load, args.iteration) if args.load and args.iteration else None,
            first_sample=args.consumed_train_samples if args.dataloader_type == "single" else None,
            evaluates=bool(getattr(args, "full_validation", False) or args.eval_iters),
            sft=bool(getattr(args, "sft", False)),
            counts_router_tokens=_routers_count_tokens(args),
            loads_on_every_stage=loads_on_every_stage(args),
            loads_on_every_tensor_rank=getattr(args, "balance_reads_on_every_rank", False),
            overlaps_passes=bool(getattr(args, "overlap_moe_expert_parallel_comm", False)),
        )


@dataclass(frozen=True)
class _LocalDecision:
    """This rank's decision before ranks agree: balance, stay stock for a reason (empty where no flag asks), or end."""

    setup: RunSetup | None = None
    stock_because: str = ""
    problem: str | None = None


def timeout_of(args: Any) -> timedelta:
    """`--distributed-timeout-minutes`."""
    return timedelta(minutes=args.distributed_timeout_minutes)


@dataclass(frozen=True)
class AgreedRun:
    """The decision of all ranks.

    Attributes:
        setup: None where they stay stock.
        stock_because: the reason, although flags ask for balancing; empty where none does.
        cautions: warnings about its options, where it balances.
    """

    setup: RunSetup | None
    stock_because: str = ""
    cautions: tuple[str, ...] = ()


def agreed_run(args: Any) -> AgreedRun:
    """The decision of the run, once all ranks of the world agree.

    Args:
        args: Megatron's validated arguments.

    Raises:
        BalanceError: on every rank; names the settings that differ, or the ranks that did not take part.
    """
    local = _decide_locally(args)
    meeting = meeting_of_world(timeout=timeout_of(args))
    if meeting is not None:
        agree(_settings(local, args=args), meeting=meeting, topic="balance flags and versions", problem=local.problem)
    if local.problem is not None:
        raise BalanceError(local.problem)
    stock = local.setup is None
    return AgreedRun(local.setup, local.stock_because, cautions=() if stock else tuple(cautions(args)))


def _routers_count_tokens(args: Any) -> bool:
    if not args.num_experts or "quantile_balancing" in np.atleast_1d(args.moe_router_load_balancing_type):
        return False  # quantile balancing refuses masks
    has_aux_loss = bool(np.any(np.atleast_1d(args.moe_aux_loss_coeff)))
    return has_aux_loss or args.moe_z_loss_coeff is not None or bool(args.moe_router_enable_expert_bias)


def _decide_locally(args: Any) -> _LocalDecision:
    try:
        config = BalanceConfig.from_megatron_args(args)
        if not config.active:
            return _LocalDecision()
        reason = why_stock(args)
        if reason is not None:
            return _LocalDecision(stock_because=reason)
        if problem := problem_of_bound_device():
            return _LocalDecision(problem=problem)
        return _LocalDecision(RunSetup.from_megatron_args(args, config=config))
    except BalanceError as error:
        return _LocalDecision(problem=str(error))


def _settings(local: _LocalDecision, *, args: Any) -> Mapping[str, str]:
    """Everything that must be equal on all ranks, by name. A stock run sends only that it is stock."""
    setup = local.setup
    if setup is None:
        return {"balancing": f"off ({local.stock_because or 'no balance flag'})"}
    settings = {"balancing": "on", "version of megatron_balance": megatron_balance.__version__}
    # After the + of its version Megatron puts the commit of the repository that it was started in.
    settings |= {f"version of {name}": metadata.version(name).partition("+")[0] for name in PACKAGES}
    settings |= {field.name: str(getattr(setup.config, field.name)) for field in fields(setup.config)}
    settings["record"] = "off" if setup.config.record is None else "on"  # ranks may name the folder differently
    if setup.config.cost_file is not None:
        settings["cost_file"] = "a file"  # ranks may name the file differently; its content is in the cost model
    settings |= {name: str(getattr(args, name, None)) for name in MEGATRON_SETTINGS}
    settings["balanced evaluation"] = str(setup.balances_evaluation)
    settings |= {"topology": str(setup.topology), "cost model": str(setup.cost_model)}
    settings["data on every pipeline stage"] = str(setup.loads_on_every_stage)
    return settings
