"""Megatron: flags, hooks, and the data iterator that hands balanced micro-batches to its training loop.

Three ways in: `torchrun … -m megatron_balance.launch SCRIPT ARGS`; `import megatron_balance.mcore.autoinstall` in
the script; or `install()` with `extra_args_provider=add_balance_args`. A training loop of one's own calls
`balanced_schedule`, a script of Megatron-Bridge `install_bridge`.
"""

from typing import TYPE_CHECKING, Any

from megatron_balance.mcore.setup.flags import add_balance_args

if TYPE_CHECKING:
    from megatron_balance.hooking.installation import Installation
    from megatron_balance.mcore.bridge import install_bridge
    from megatron_balance.mcore.loop import balanced_schedule
    from megatron_balance.mcore.options import cautions, why_stock
    from megatron_balance.mcore.packed_params import packed_seq_params

__all__ = [
    "add_balance_args",
    "balanced_schedule",
    "cautions",
    "install",
    "install_bridge",
    "packed_seq_params",
    "why_stock",
]


def install() -> "Installation[str]":
    """Hook Megatron in this process; see `megatron_balance.mcore.hooks`."""
    from megatron_balance.mcore import hooks  # loads torch

    return hooks.install()


def __getattr__(name: str) -> Any:
    if name == "balanced_schedule":  # loads torch, as do the hooks
        from megatron_balance.mcore.loop import balanced_schedule

        return balanced_schedule
    if name in ("cautions", "why_stock"):
        from megatron_balance.mcore import options

        return getattr(options, name)
    if name == "install_bridge":
        from megatron_balance.mcore.bridge import install_bridge

        return install_bridge
    if name == "packed_seq_params":  # loads Megatron
        from megatron_balance.mcore.packed_params import packed_seq_params

        return packed_seq_params
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
