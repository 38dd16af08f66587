"""Applies all rows to a run's arguments: refusals, reasons to stay stock, cautions.

Rows are checked right after parsing, before anything is initialised, and again on validated arguments, which
checkpoints and Megatron's validation may have changed (`run_setup.py`: all ranks agree on the findings).
"""

from __future__ import annotations

from typing import Any

from megatron_balance.mcore.options.attention import ATTENTION
from megatron_balance.mcore.options.balance_flags import BALANCE_FLAGS
from megatron_balance.mcore.options.conditions import BALANCING
from megatron_balance.mcore.options.dynamic_cp import DYNAMIC_CP
from megatron_balance.mcore.options.evaluation import EVALUATION
from megatron_balance.mcore.options.experts import EXPERTS
from megatron_balance.mcore.options.families import FAMILIES
from megatron_balance.mcore.options.memory import MEMORY
from megatron_balance.mcore.options.option import Option, Support
from megatron_balance.mcore.options.padded_rows import PADDED_ROWS
from megatron_balance.mcore.options.parallelism import PARALLELISM
from megatron_balance.mcore.options.precision import PRECISION
from megatron_balance.mcore.options.training_loop import TRAINING_LOOP

SUBJECTS: dict[str, tuple[Option, ...]] = {
    "Parallelism": PARALLELISM,
    "Context parallelism of each micro-batch": DYNAMIC_CP,
    "Mixture of experts": EXPERTS,
    "Attention and layers": ATTENTION,
    "Model families": FAMILIES,
    "Precision": PRECISION,
    "Memory and graphs": MEMORY,
    "Training loop and data": TRAINING_LOOP,
    "Evaluation": EVALUATION,
    "Padded rows": PADDED_ROWS,
}
"""Megatron's options by subject, checked in runs that balance."""


def problems(args: Any) -> list[str]:
    """All refusals of these arguments; empty where they work together.

    Args:
        args: Megatron's namespace with the balance flags, parsed or validated.
    """
    return [row.message(args) for row in _rows_of(args) if row.support is Support.REFUSED]


def why_stock(args: Any) -> str | None:
    """The reason why a run with balance flags must stay stock, or None.

    Args:
        args: Megatron's namespace with the balance flags, parsed or validated.
    """
    return next((row.message(args) for row in _rows_of(args) if row.support is Support.STOCK), None)


def executor_runs_our_plan(args: Any) -> bool:
    """True if dev's executor of dynamic context parallelism runs this package's plan."""
    return bool(getattr(args, "dynamic_context_parallel", False) and getattr(args, "balance_data", False))


def stock_notice(args: Any, *, reason: str) -> str:
    """The log line of a run that stays stock for a reason from `why_stock`; arguments as for `problems`."""
    if executor_runs_our_plan(args):
        return f"Megatron's own executor runs this package's plan. {reason}"
    return f"training continues without balancing. {reason}"


def cautions(args: Any) -> list[str]:
    """Warnings about options that a run that balances may have.

    Args:
        args: Megatron's namespace with the balance flags, parsed or validated.
    """
    return [row.message(args) for row in _rows_of(args) if row.support is Support.SUPPORTED]


def _rows_of(args: Any) -> list[Option]:
    """The rows that apply to these arguments."""
    rows = [row for row in BALANCE_FLAGS if row.applies(args)]
    if BALANCING(args):
        rows += [row for subject in SUBJECTS.values() for row in subject if row.applies(args)]
    return rows
