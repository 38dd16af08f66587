"""Runs `python -m torchspec.train_entry` with balanced ranks.

    python -m megatron_balance.adapters.torchspec --balance-approach B --balance-window 4 --config FILE [...]

Everything but the `--balance-*` flags goes to TorchSpec.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatron_balance.adapters.torchspec.hooks import install
from megatron_balance.adapters.torchspec.settings import read_flags


def main(arguments: Sequence[str] | None = None) -> None:
    """Hook TorchSpec's controller, then run its training.

    Args:
        arguments: the command line; None takes the process's own.
    """
    settings, others = read_flags(arguments)
    install(**asdict(settings))
    sys.argv[1:] = others
    runpy.run_module("torchspec.train_entry", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
