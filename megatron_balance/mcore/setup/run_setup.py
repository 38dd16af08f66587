"""Builds this rank's settings and checks that all ranks agree.

Ranks agree before any of them makes a process group (`runtime/agreement.py`), those of a stock run too: a rank cannot
know that the others mean to balance.

Invariant: what is wrong with the flags or files of one rank is raised on every rank of the world.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from importlib import metadata
from typing import Any

import megatron_balance
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options.table import cautions, why_stock
from megatron_balance.mcore.setup.arguments import (
    BalanceConfig,
    cost_model_from_megatron_args,
    topology_from_megatron_args,
)
from megatron_balance.mcore.setup.groups import meeting_of_world
from megatron_balance.mcore.setup.memory_cap import with_smallest_cap, with_token_cap
from megatron_balance.runtime.agreement import agree
from megatron_balance.topology import Limits, Topology

PACKAGES = ("megatron-core", "torch", "numpy")
"""Other versions of these might plan or compute otherwise."""

MEGATRON_SETTINGS = (
    "train_iters",
    "global_batch_size",
    "rampup_batch_size",
    "micro_batch_size",
    "seq_length",
    "seed",
    "dataloader_type",
    "log_interval",
    "iteration",
    "consumed_train_samples",
)
"""What Megatron's own arguments decide of when ranks of this package meet, and of which samples."""


@dataclass(frozen=True)
class RunSetup:
    """What plans are made from.

    Attributes:
        config: the flags.
        topology: the ranks.
        limits: what a micro-batch may hold.
        cost_model: what a sample costs.
        timeout: of collectives.
    """

    config: BalanceConfig
    topology: Topology
    limits: Limits
    cost_model: CostModel
    timeout: timedelta

    @classmethod
    def from_megatron_args(cls, args: Any, *, config: BalanceConfig) -> RunSetup:
        """From validated arguments.

        Raises:
            BalanceError: a calibration that cannot be read, or a model whose FLOPs are not known.
        """
        topology = topology_from_megatron_args(args)
        config = with_token_cap(config, args=args)
        return cls(
            config,
            topology=topology,
            limits=config.limits(micro_batch_size=args.micro_batch_size, topology=topology),
            cost_model=cost_model_from_megatron_args(args, config=config),
            timeout=timeout_of(args),
        )


@dataclass(frozen=True)
class _LocalDecision:
    """What this rank would do: balance, stay stock for a reason (empty where no flag asks), or end."""

    setup: RunSetup | None = None
    stock_because: str = ""
    problem: str | None = None


def timeout_of(args: Any) -> timedelta:
    """`--distributed-timeout-minutes`."""
    return timedelta(minutes=args.distributed_timeout_minutes)


@dataclass(frozen=True)
class AgreedRun:
    """What all ranks of the run do.

    Attributes:
        setup: None where they stay stock.
        stock_because: why, although flags ask for balancing; empty where none does.
        cautions: what to know of the options that it has, where it balances.
    """

    setup: RunSetup | None
    stock_because: str = ""
    cautions: tuple[str, ...] = ()


def agreed_run(args: Any) -> AgreedRun:
    """What this run does, once all ranks of the world have said the same.

    Args:
        args: Megatron's validated arguments.

    Raises:
        BalanceError: on every rank alike; names the settings that differ, or the ranks that did not come.
    """
    local = _decide_locally(args)
    meeting = meeting_of_world(timeout=timeout_of(args))
    if meeting is not None:
        agree(_settings(local, args=args), meeting=meeting, topic="balance flags and versions", problem=local.problem)
    if local.problem is not None:
        raise BalanceError(local.problem)
    setup = _with_smallest_cap(local.setup, args=args)
    return AgreedRun(setup, local.stock_because, cautions=() if setup is None else tuple(cautions(args)))


def _with_smallest_cap(setup: RunSetup | None, *, args: Any) -> RunSetup | None:
    if setup is None or not setup.config.derives_cap:
        return setup
    config = with_smallest_cap(setup.config, timeout=setup.timeout)
    limits = config.limits(micro_batch_size=args.micro_batch_size, topology=setup.topology)
    return replace(setup, config=config, limits=limits)


def _decide_locally(args: Any) -> _LocalDecision:
    try:
        config = BalanceConfig.from_megatron_args(args)
        if not config.active:
            return _LocalDecision()
        reason = why_stock(args)
        if reason is not None:
            return _LocalDecision(stock_because=reason)
        return _LocalDecision(RunSetup.from_megatron_args(args, config=config))
    except BalanceError as error:
        return _LocalDecision(problem=str(error))


def _settings(local: _LocalDecision, *, args: Any) -> Mapping[str, str]:
    """Everything that must be equal on all ranks, by name. A stock run says no more than that it is one."""
    setup = local.setup
    if setup is None:
        return {"balancing": f"off ({local.stock_because or 'no balance flag'})"}
    settings = {"balancing": "on", "version of megatron_balance": megatron_balance.__version__}
    # What Megatron's version says behind the + is the commit of whatever repository it was started in.
    settings |= {f"version of {name}": metadata.version(name).partition("+")[0] for name in PACKAGES}
    settings |= {field.name: str(getattr(setup.config, field.name)) for field in fields(setup.config)}
    if setup.config.derives_cap:
        # Devices may differ; the smallest cap is taken once all have agreed.
        del settings["max_tokens_per_gpu"]
    settings["record"] = "off" if setup.config.record is None else "on"  # ranks may name the folder differently
    if setup.config.calibration is not None:
        settings["calibration"] = "a file"  # likewise; what it says is in the cost model
    settings |= {name: str(getattr(args, name, None)) for name in MEGATRON_SETTINGS}
    settings |= {"topology": str(setup.topology), "cost model": str(setup.cost_model)}
    return settings
