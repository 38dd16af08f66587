"""Partition algorithms, one a file: integers in, lists of item indices or bin numbers out.

`ALGORITHMS` names those that a schedule can be made with. None depends on ranks, tokens or Megatron.
"""

from __future__ import annotations

from megatron_balance.planner.partition.first_fit import first_fit
from megatron_balance.planner.partition.greedy import greedy
from megatron_balance.planner.partition.karmarkar_karp import karmarkar_karp, karmarkar_karp_rows
from megatron_balance.planner.partition.level_packing import level_packing
from megatron_balance.planner.partition.peeling import peel_rows
from megatron_balance.planner.partition.refine import refine

ALGORITHMS = ("level_packing", "karmarkar_karp", "greedy", "first_fit")
"""Names that `--balance-algorithm` and `build_data_schedule` take; `packing.place` and `packing.by_rank` call them."""

__all__ = [
    "ALGORITHMS",
    "first_fit",
    "greedy",
    "karmarkar_karp",
    "karmarkar_karp_rows",
    "level_packing",
    "peel_rows",
    "refine",
]
