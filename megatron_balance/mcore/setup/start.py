"""Decides on every rank whether the run balances, once all ranks agree.

Ranks agree before any of them makes a process group (`runtime/agreement.py`). Ranks of a stock run take part too: a
rank cannot know that others balance.

Invariant: an error in the flags or files of one rank is raised on every rank of the world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import metadata
from typing import Any

import megatron_balance
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import nothing_balances, stock_notice, why_stock
from megatron_balance.mcore.setup.flags import refuse
from megatron_balance.mcore.setup.layout import meeting_of_world, problem_of_bound_device
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.runtime.start import agree

PACKAGES = ("megatron-core", "torch", "numpy")
"""Packages whose other versions might plan or compute differently."""

OUR_FLAGS = ("balance", "use_dynamic_batch_size", "max_tokens_per_gpu")
"""Beginnings of their names."""

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
"""Megatron's options that decide when ranks of this package meet, and on which samples."""


def agreed_settings(
    options: Mapping[str, Any], *, read: Callable[[], Settings], timeout: timedelta, log: RunLog
) -> Settings | None:
    """The settings of the run, or None where it stays stock; every rank of the world calls it.

    `options` are Megatron's and the balance flags, by name; where they go together, `read` reads the settings.

    Raises:
        BalanceError: on every rank; names the settings that differ, or the ranks that did not take part.
    """
    settings: Settings | None = None
    reason = problem = None
    try:
        refuse(options)
        reason = why_stock(options)
        if reason is None and not nothing_balances(options):
            problem = problem_of_bound_device()
            settings = read() if problem is None else None
    except BalanceError as error:
        problem = str(error)
    meeting = meeting_of_world(timeout=timeout)
    if meeting is not None:
        # A stock run sends only that it is stock.
        said = {"balancing": f"off ({reason or 'no balance flag'})"}
        if settings is not None:
            said = _compared(settings, options=options)
        agree(said, meeting=meeting, topic="balance flags and versions", problem=problem)
    if problem is not None:
        raise BalanceError(problem)
    if reason is not None:
        log.warn_once(stock_notice(options, reason=reason))
    if settings is not None:
        for line in settings.says:
            log.say(line)
        for line in settings.warns:
            log.warn_once(line)
    return settings


def _compared(settings: Settings, *, options: Mapping[str, Any]) -> dict[str, str]:
    """Everything that must be equal on all ranks, by name."""
    said = {"balancing": "on", "version of megatron_balance": megatron_balance.__version__}
    # After the + of its version Megatron puts the commit of the repository that it was started in.
    said |= {f"version of {name}": metadata.version(name).partition("+")[0] for name in PACKAGES}
    said |= {name: str(value) for name, value in options.items() if name.startswith(OUR_FLAGS)}
    # Ranks may name files differently; what costs say is in the cost model.
    said |= {name: "off" if options[name] is None else "on" for name in ("balance_record", "balance_cost")}
    said |= {name: str(options.get(name)) for name in MEGATRON_SETTINGS}
    said["balanced evaluation"] = str(settings.eval_limits is not None)
    said |= {"topology": str(settings.topology), "cost model": str(settings.cost_model)}
    said["data on every pipeline stage"] = str(settings.loads_on_every_stage)
    return said
