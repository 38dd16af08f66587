"""Runs `python -m torchspec.train_entry` with balanced ranks.

    python -m megatron_balance.adapters.torchspec --balance-approach B --balance-window 4 --config FILE [...]

Everything but the `--balance-*` flags goes to TorchSpec.
"""

from __future__ import annotations

import sys
from dataclasses import asdict

from megatron_balance.adapters.kit import launch
from megatron_balance.adapters.torchspec import install, read_flags
from megatron_balance.errors import BalanceError

if __name__ == "__main__":
    try:
        settings, others = read_flags(sys.argv[1:])
    except BalanceError as error:
        raise SystemExit(f"megatron_balance: {error}") from error
    launch(["-m", "torchspec.train_entry", *others], install=lambda: install(**asdict(settings)), usage=__doc__ or "")
