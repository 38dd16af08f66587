"""The adapter kit: what every adapter needs, so that an adapter is its host's names, its settings and its plan.

`Adapter` installs a checked table of hooks once and undoes it, `launch` runs a script unedited with it in place,
`split_rollout`, `even_parts` and `agreed_microbatches` make the plans that several hosts ask for: steps of a rollout
batch, rows on ranks, rows in micro-batches. `kit.rows`, which needs torch, moves rows between ranks.
`tests/adapters/template` has an adapter to copy.
"""

from megatron_balance.adapters.kit.installing import Adapter, check_not_started, find_version, hook_row, launch
from megatron_balance.adapters.kit.plans import RolloutSplit, agreed_microbatches, even_parts, row_costs, split_rollout
from megatron_balance.hooking import Function, Hook, Installation

__all__ = [
    "Adapter",
    "Function",
    "Hook",
    "Installation",
    "RolloutSplit",
    "agreed_microbatches",
    "check_not_started",
    "even_parts",
    "find_version",
    "hook_row",
    "launch",
    "row_costs",
    "split_rollout",
]
