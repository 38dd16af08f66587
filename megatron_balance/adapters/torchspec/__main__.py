"""`python -m torchspec.train_entry` with balanced ranks.

    python -m megatron_balance.adapters.torchspec --balance-approach B --balance-window 4 --config FILE [...]

Everything but the `--balance-*` flags goes to TorchSpec.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

from megatron_balance.adapters.torchspec.hooks import install
from megatron_balance.adapters.torchspec.settings import APPROACHES, COSTS


def main(arguments: Sequence[str] | None = None) -> None:
    """Hook TorchSpec's controller, then run its training.

    Args:
        arguments: of the command line; None takes the process's own.
    """
    # No -h: TorchSpec's own is asked for.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--balance-approach", choices=APPROACHES, default="B")
    parser.add_argument("--balance-window", type=int, default=2)
    parser.add_argument("--balance-cost", choices=COSTS, default="padded")
    parser.add_argument("--balance-bucket-batches", type=int, default=1)
    flags, theirs = parser.parse_known_args(arguments)
    install(
        flags.balance_approach,
        window=flags.balance_window,
        cost=flags.balance_cost,
        bucket_batches=flags.balance_bucket_batches,
    )
    sys.argv[1:] = theirs
    runpy.run_module("torchspec.train_entry", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
