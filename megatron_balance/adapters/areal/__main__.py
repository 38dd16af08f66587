"""Runs an AReaL script or module with the hooks installed: a trainer, or a worker of the single controller."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta

from megatron_balance.adapters.areal import install
from megatron_balance.adapters.areal.single_rank import MAX_WAIT
from megatron_balance.adapters.kit import launch

PROGRAM = "python -m megatron_balance.adapters.areal"


def main() -> None:
    """Hook, then run the target as `__main__`."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--cost", help="tokens or flops; by default flops where there is a model, else tokens")
    parser.add_argument("--model", help="preset name, or path of a Hugging Face config.json")
    parser.add_argument("--ep-size", type=int, default=1, help="expert-parallel ranks")
    parser.add_argument("--single-rank-load", action="store_true", help="one rank rolls out for all")
    parser.add_argument(
        "--max-wait-hours", type=float, default=MAX_WAIT / timedelta(hours=1), help="for the rank that rolls out"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="TARGET is a module, not a file")
    parser.add_argument("target", help="script or module to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    flags = parser.parse_args(sys.argv[1:])
    launch(
        [*(["-m"] if flags.is_module else []), flags.target, *flags.arguments],
        install=lambda: install(
            cost=flags.cost,
            model=flags.model,
            ep_size=flags.ep_size,
            single_rank_load=flags.single_rank_load,
            max_wait=timedelta(hours=flags.max_wait_hours),
        ),
        usage=f"{PROGRAM} [FLAGS] (SCRIPT | -m MODULE) [ARGS ...]",
    )


if __name__ == "__main__":
    main()
