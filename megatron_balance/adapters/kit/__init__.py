"""The adapter kit: what every adapter needs, so that an adapter is its host's names, its settings and its plan.

`Installation` installs a checked table of hooks once and undoes it; `launch` runs an unedited script with it in place.
`split_rollout` and `even_parts` plan the steps of a rollout batch and samples on ranks. `kit.ranks`, which needs torch,
packs samples alike on all ranks. docs/write-an-adapter.md has an adapter to copy. Provisional.
"""

from megatron_balance.adapters.kit.plans import even_parts, sample_costs, split_rollout
from megatron_balance.hooking import Function, Hook, Installation, check_not_started, launch

__all__ = [
    "Function",
    "Hook",
    "Installation",
    "check_not_started",
    "even_parts",
    "launch",
    "sample_costs",
    "split_rollout",
]
