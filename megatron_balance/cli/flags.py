"""Flags of `compare`: lengths, batch, ranks, cost, planning. Declared once, read once.

Invariant: a flag that was not given is None (or empty), so that a recorded run's own value can stand in for it.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import replace

from megatron_balance.errors import BalanceError
from megatron_balance.lengths.read import SYNTHETIC_LENGTHS
from megatron_balance.mcore.setup.arguments import ALL_RANKS
from megatron_balance.mcore.setup.flags import context_parallel_limit
from megatron_balance.mcore.setup.one_flag import OFF
from megatron_balance.model.presets import PRESETS
from megatron_balance.planner import objective_names
from megatron_balance.topology import Topology

LENGTHS_HELP = f"""\
lengths:
  FILE.npy .npz .jsonl .csv .txt .parquet, in the order of training; or synthetic:NAME[:N], drawn with --seed:
  {", ".join(SYNTHETIC_LENGTHS)}"""

MODELS_HELP = f"""\
models:
{textwrap.fill(", ".join(PRESETS), 112, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)}
  or the path of a Hugging Face config.json"""


def add_lengths_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the source of lengths; each command declares LENGTHS itself."""
    group = parser.add_argument_group("lengths")
    group.add_argument("--key", metavar="NAME", help="array, column or field of the file that holds the lengths")
    group.add_argument("--shuffle", action="store_true", help="shuffle the lengths before cutting them into batches")
    group.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of --shuffle and of synthetic lengths (default: 0)"
    )


def add_batch_flags(parser: argparse.ArgumentParser, *, steps_default: str) -> None:
    """Flags for the sizes of global batches and micro-batches, and the number of steps."""
    group = parser.add_argument_group("batch")
    group.add_argument("--global-batch-size", type=int, metavar="N", help="samples a step")
    group.add_argument(
        "--max-tokens-per-gpu",
        type=int,
        metavar="T",
        help="tokens a GPU may hold in a micro-batch; longer samples run alone",
    )
    group.add_argument("--steps", type=int, metavar="K", help=f"global batches to plan (default: {steps_default})")


def add_rank_flags(parser: argparse.ArgumentParser) -> None:
    """Flags for the ranks of the run."""
    group = parser.add_argument_group("ranks, as in Megatron")
    group.add_argument("--dp-size", type=int, metavar="D", help="data-parallel ranks")
    group.add_argument("--cp-size", type=int, metavar="C", help="context-parallel ranks (default: 1)")
    group.add_argument("--tp-size", type=int, metavar="P", help="tensor-parallel ranks (default: 1)")
    group.add_argument("--pp-size", type=int, metavar="P", help="pipeline stages (default: 1)")
    group.add_argument("--ep-size", type=int, metavar="E", help="expert-parallel ranks (default: 1)")
    group.add_argument(
        "--sequence-parallel", action="store_true", help="activations are split over tensor-parallel ranks"
    )
    group.add_argument(
        "--microbatch-multiple",
        type=int,
        metavar="G",
        help="num_microbatches must be a multiple of G, as under interleaved pipelines (default: 1)",
    )


def add_cost_flags(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Flags for the cost of a sample."""
    group = parser.add_argument_group("cost")
    group.add_argument(
        "--model", metavar="MODEL", help="preset name, or a Hugging Face config.json; its FLOPs are the cost"
    )
    group.add_argument(
        "--cost",
        metavar="COST",
        help="what a sample costs: tokens, flops, or a seconds.json of megatron-balance fit (default: flops with "
        "--model, else tokens)",
    )
    group.add_argument(
        "--cp-bandwidth",
        type=float,
        metavar="GBPS",
        help="GB/s that a GPU receives from the others of its context-parallel group; with --model it says what that "
        "costs (default: 450, NVLink, on at most 8 GPUs, else 50, one 400 Gb/s link a GPU)",
    )
    return group


def add_planning_flags(
    parser: argparse.ArgumentParser, *, objective_default: str, dynamic_cp_help: str
) -> argparse._ArgumentGroup:
    """Flags for planning and judging."""
    group = parser.add_argument_group("planning")
    group.add_argument(
        "--objective",
        choices=objective_names(),
        help="when ranks wait for one another: once a step, in every micro-batch (expert parallelism, FSDP), in a "
        f"pipeline (default: {objective_default})",
    )
    group.add_argument("--algorithm", default="auto", metavar="NAME", help="how samples are packed (default: auto)")
    group.add_argument(
        "--balance-context-parallel",
        nargs="?",
        type=context_parallel_limit,
        const=ALL_RANKS,
        metavar="SIZE",
        help=f"as in training: {dynamic_cp_help}",
    )
    return group


def max_cp_size(args: argparse.Namespace) -> int | None:
    """The largest context-parallel size of `--balance-context-parallel`; None for all ranks."""
    limit = args.balance_context_parallel
    return None if limit in (None, ALL_RANKS, OFF) else limit


def topology_from_flags(args: argparse.Namespace, *, base: Topology | None = None) -> Topology:
    """The ranks that flags name, on top of those of a recorded run.

    Raises:
        BalanceError: a size is not positive, or there are no data-parallel ranks.
    """
    names = ("dp_size", "cp_size", "tp_size", "pp_size", "ep_size", "microbatch_multiple")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.sequence_parallel:
        given["sequence_parallel"] = True
    if base is not None:
        return replace(base, **given)
    if "dp_size" not in given:
        raise BalanceError("--dp-size is missing: give the number of data-parallel ranks.")
    return Topology(given.pop("dp_size"), **given)
