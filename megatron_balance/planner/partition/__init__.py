"""Partition algorithms, one a file: integers in, lists of item indices or bin numbers out.

`ALGORITHMS` names those that a schedule can be asked for. They know nothing of ranks, tokens or Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.planner.partition.first_fit import first_fit
from megatron_balance.planner.partition.greedy import greedy
from megatron_balance.planner.partition.karmarkar_karp import karmarkar_karp, karmarkar_karp_rows
from megatron_balance.planner.partition.level_packing import level_packing
from megatron_balance.planner.partition.peeling import peel_rows
from megatron_balance.planner.partition.refine import refine

ALGORITHMS: dict[str, Callable[..., Any]] = {}
"""Algorithms by the name that `--balance-algorithm` and `build_data_schedule` take."""


def register(name: str, algorithm: Callable[..., Any]) -> None:
    """Names an algorithm.

    Raises:
        BalanceError: the name is taken.
    """
    if name in ALGORITHMS:
        raise BalanceError(f"algorithm {name!r} is registered already, as {ALGORITHMS[name].__name__}.")
    ALGORITHMS[name] = algorithm


register("level_packing", level_packing)
register("karmarkar_karp", karmarkar_karp)
register("greedy", greedy)
register("first_fit", first_fit)

__all__ = [
    "ALGORITHMS",
    "first_fit",
    "greedy",
    "karmarkar_karp",
    "karmarkar_karp_rows",
    "level_packing",
    "peel_rows",
    "refine",
    "register",
]
