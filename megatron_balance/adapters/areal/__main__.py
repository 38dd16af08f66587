"""Runs a script or a module of AReaL's with the hooks in place: a trainer, or a worker of its single controller."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from datetime import timedelta

from megatron_balance.adapters.areal.hooks import install
from megatron_balance.adapters.areal.single_rank import MAX_WAIT


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, and what they stand before."""
    parser = argparse.ArgumentParser(prog="python -m megatron_balance.adapters.areal", description=__doc__)
    parser.add_argument("--cost", help="tokens or flops; by default flops where there is a model, else tokens")
    parser.add_argument("--model", help="preset name, or path of a Hugging Face config.json")
    parser.add_argument("--ep-size", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--single-rank-load", action="store_true", help="one rank rolls out for all")
    parser.add_argument(
        "--max-wait-hours", type=float, default=MAX_WAIT / timedelta(hours=1), help="for the rank that rolls out"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="TARGET is a module, not a file")
    parser.add_argument("target", help="what to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(arguments)


def main() -> None:
    """Hook, then run the target as `__main__`."""
    args = parse(sys.argv[1:])
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
