"""Megatron: flags, hooks, and the data iterator that hands balanced micro-batches to its training loop.

Three ways in: `torchrun … -m megatron_balance.launch SCRIPT ARGS`; `import megatron_balance.mcore.autoinstall` in
the script; or `install()` with `extra_args_provider=add_balance_args`. A training loop of one's own calls
`balanced_schedule`, a script of Megatron-Bridge `install_bridge`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megatron_balance.mcore.setup.flags import add_balance_args

if TYPE_CHECKING:
    from megatron_balance.mcore.bridge import install_bridge
    from megatron_balance.mcore.hooks import install
    from megatron_balance.mcore.loop import balanced_schedule
    from megatron_balance.mcore.microbatch import packed_seq_params
    from megatron_balance.mcore.setup.rules import cautions

__all__ = [
    "add_balance_args",
    "balanced_schedule",
    "cautions",
    "install",
    "install_bridge",
    "packed_seq_params",
]

_HOMES = {
    "balanced_schedule": "loop",
    "cautions": "setup.rules",
    "install": "hooks",
    "install_bridge": "bridge",
    "packed_seq_params": "microbatch",
}
"""Modules that are loaded when a name is asked for: most load torch, or Megatron."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
