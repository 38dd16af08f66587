"""Megatron: flags, hooks, and the data iterator that hands balanced micro-batches to its training loop.

Three ways in: `torchrun … -m megatron_balance.launch SCRIPT ARGS`; `import megatron_balance.mcore.autoinstall` in
the script; or `install()` with `extra_args_provider=add_balance_args`.
"""

from typing import TYPE_CHECKING

from megatron_balance.mcore.setup.flags import add_balance_args

if TYPE_CHECKING:
    from megatron_balance.hooking.installation import Installation

__all__ = ["add_balance_args", "install"]


def install() -> "Installation[str]":
    """Hook Megatron in this process; see `megatron_balance.mcore.hooks`."""
    from megatron_balance.mcore import hooks  # loads torch

    return hooks.install()
