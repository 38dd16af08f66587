"""AReaL adapter: `install()` hooks it; other functions are for scripts that call them directly.

    from megatron_balance.adapters import areal
    areal.install(cost="flops", model="Qwen3-8B")

or, with nothing to edit, `python -m megatron_balance.adapters.areal --cost flops --model Qwen3-8B SCRIPT ...`.
"""

from megatron_balance.adapters.areal.dispatch import balance_batch
from megatron_balance.adapters.areal.hooks import install, is_installed
from megatron_balance.adapters.areal.single_rank import SingleRankLoad, endless
from megatron_balance.adapters.areal.trainer import scaled_for_one_rank
from megatron_balance.adapters.areal.transport import distributed_batch, redistribute

__all__ = [
    "SingleRankLoad",
    "balance_batch",
    "distributed_batch",
    "endless",
    "install",
    "is_installed",
    "redistribute",
    "scaled_for_one_rank",
]
