"""The adapter's options, and the flags that set them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

from megatron_balance.adapters.areal.single_rank import MAX_WAIT
from megatron_balance.cost.model import CostModel
from megatron_balance.model.vision import VisionEncoder


@dataclass(frozen=True)
class ArealOptions:
    """Options of the adapter.

    Attributes:
        cost_model: what a row costs.
        ep_size: expert-parallel ranks.
        encoder: runs the images of a row; None where they cost nothing.
        single_rank_load: one rank rolls out for all.
        gather_all: fill `RedistributedData.all_data` with what other ranks have.
        max_wait: how long ranks wait for the one that rolls out.
    """

    cost_model: CostModel = field(default_factory=CostModel.tokens)
    ep_size: int = 1
    encoder: VisionEncoder | None = None
    single_rank_load: bool = False
    gather_all: bool = False
    max_wait: timedelta = MAX_WAIT


def parse_flags(arguments: Sequence[str], *, description: str | None) -> argparse.Namespace:
    """The flags of `python -m megatron_balance.adapters.areal`, and the target and its arguments after them."""
    parser = argparse.ArgumentParser(prog="python -m megatron_balance.adapters.areal", description=description)
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
    return parser.parse_args(arguments)
