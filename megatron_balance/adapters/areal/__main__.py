"""Runs an AReaL script or module with the hooks installed: a trainer, or a worker of the single controller."""

from __future__ import annotations

import runpy
import sys
from datetime import timedelta

from megatron_balance.adapters.areal.hooks import install
from megatron_balance.adapters.areal.settings import parse_flags


def main() -> None:
    """Hook, then run the target as `__main__`."""
    args = parse_flags(sys.argv[1:], description=__doc__)
    install(
        cost=args.cost,
        model=args.model,
        ep_size=args.ep_size,
        single_rank_load=args.single_rank_load,
        max_wait=timedelta(hours=args.max_wait_hours),
    )
    sys.argv = [args.target, *args.arguments]
    if args.is_module:
        runpy.run_module(args.target, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(args.target, run_name="__main__")


if __name__ == "__main__":
    main()
