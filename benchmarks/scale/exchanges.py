"""Compares ways of exchanging samples, of agreeing and of planning, step by step in one run of gloo ranks.

    python -m benchmarks.scale.exchanges --lengths FOLDER                                    8 and 16 ranks, a minute
    python -m benchmarks.scale.exchanges --whole --lengths FOLDER --out benchmarks/results   what is committed

Ranks are processes of this machine. In every step all of them plan the same real lengths, move the same bytes in each
way in turn (one all_to_all of the whole group, or messages between ranks that share samples) and agree in each (an
all_gather, or `largest_row`). Every way has a group of its own, whose ranks connect when they first talk. The exit
status is 1 where the sockets of the messages are not one to each rank met, and one that listens.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from training_run import ROOT

from benchmarks.markdown import table
from benchmarks.planner.setups import find_lengths
from benchmarks.results_file import made_by, page_head, versions_of, write_results
from benchmarks.scale.gloo_world import run_ranks
from benchmarks.scale.meeting_rank import lazy_group, tcp_sockets
from benchmarks.scale.one_planner import DP_SIZE, NUM_SAMPLES, plan_in_both_ways, plans_table
from benchmarks.scale.one_planner import summary as summary_of_plans
from benchmarks.scale.samples import LENGTH_SET, SAMPLES_PER_RANK, Samples, item_of, planner_settings
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.runtime.buffer_exchange import exchange_with_all, exchange_with_peers
from megatron_balance.runtime.collectives import all_gather_row, largest_row
from megatron_balance.runtime.gather import gather_sample_lengths
from megatron_balance.runtime.prepared_exchange import PreparedExchange, prepare_exchange
from megatron_balance.samples.unpacking import split_packed

NUM_RANKS = (8, 16)
WHOLE_NUM_RANKS = (*NUM_RANKS, 32, 64)
NUM_STEPS = 11
SHOWN_STEPS = (1, 2, 10, 100)
NODE_RANKS = (4, 8)
PLANNED_RANKS = (64, 1250, 10_000)
"""Data-parallel ranks whose plans alone are made."""

EXCHANGES = "all_to_all", "messages"
AGREEMENTS = "all_gather", "largest_row"
NOTHING = "nothing"
"""The barriers between which each way is measured; taken off its CPU seconds."""


def compare(num_steps: int, *, lengths_folder: Path | None) -> dict[str, Any]:
    """Move and agree in every way, as one rank of an initialised world.

    Returns:
        `ways`: way → `first` and `later`, each `[seconds, CPU seconds of the process]`, of the first step and the mean
        of the others. `num_peers`: ranks that this one exchanged samples with, mean of all steps; `num_met`: in any of
        them; `sockets`: for the messages.
    """
    world = dist.group.WORLD
    assert world is not None, "initialised"
    ways = (NOTHING, *EXCHANGES, *AGREEMENTS)
    groups = {way: lazy_group([range(world.size())]) for way in ways}
    spent: dict[str, list[list[float]]] = {way: [] for way in ways}
    sockets, peers, met = 1, list[int](), set[int]()  # the one that listens
    for step, lengths in enumerate(Samples(world.size(), num_steps, lengths_folder).lengths()):
        prepared, digest = _prepared(lengths, group=world)
        own = {*prepared.send_nbytes, *prepared.arriving}
        peers.append(len(own))
        met |= own
        received: dict[str, torch.Tensor] = {}
        for way in ways if step % 2 else reversed(ways):
            work = _work(way, prepared, digest=digest, group=groups[way], received=received)
            dist.barrier()
            before = len(tcp_sockets())
            dist.barrier()
            started = time.perf_counter(), time.process_time()
            work()
            seconds = time.perf_counter() - started[0]
            dist.barrier()  # gloo's threads work on for others
            spent[way].append([seconds, time.process_time() - started[1]])
            sockets += (len(tcp_sockets()) - before) * (way == "messages")
        first, second = (received[way] for way in EXCHANGES)
        assert torch.equal(first, second), "both ways move the same bytes"
    return {
        "ways": {
            way: {"first": of_way[0], "later": [statistics.fmean(clock) for clock in zip(*of_way[1:], strict=True)]}
            for way, of_way in spent.items()
        },
        "num_peers": statistics.fmean(peers),
        "num_met": len(met),
        "sockets": sockets,
    }


def _prepared(lengths: NDArray[np.int64], *, group: dist.ProcessGroup) -> tuple[PreparedExchange, int]:
    """This rank's exchange and the digest of the plan."""
    samples = [split_packed(item_of(length), unit="segment")[0] for length in lengths[group.rank()].tolist()]
    gathered = gather_sample_lengths(samples, group=group)
    schedule = _plan(lengths)
    prepared = prepare_exchange(
        samples,
        sample_ids=np.arange(lengths.size),
        destinations=schedule.destinations(),
        gathered=gathered,
        group=group,
    )
    return prepared, schedule.digest()


def _plan(lengths: NDArray[np.int64]) -> DataSchedule:
    _, topology, limits, cost_model = planner_settings(len(lengths))
    homes = np.repeat(np.arange(len(lengths)), lengths.shape[1])
    return build_data_schedule(
        lengths.ravel(), cost_model=cost_model, topology=topology, limits=limits, home_ranks=homes
    )


def _work(
    way: str,
    prepared: PreparedExchange,
    *,
    digest: int,
    group: dist.ProcessGroup | None,
    received: dict[str, torch.Tensor],
) -> Callable[[], object]:
    assert group is not None, "all ranks are members"
    row = np.array([-1, digest, -digest])
    if way == NOTHING:
        return lambda: None
    if way == "all_gather":
        return lambda: all_gather_row(row[:2], group=group, what=way)
    if way == "largest_row":
        return lambda: largest_row(row, group=group, what=way)
    move = exchange_with_all if way == "all_to_all" else exchange_with_peers
    nbytes = {rank: block.nbytes for rank, block in prepared.arriving.items()}
    received[way] = torch.zeros(sum(nbytes.values()), dtype=torch.uint8)
    return lambda: move(
        received[way], prepared.send, receive_sizes=nbytes, send_sizes=prepared.send_nbytes, group=group
    )


def ranks_met(num_ranks: int, *, lengths_folder: Path | None) -> list[float]:
    """Ranks that one has exchanged samples with after each of `SHOWN_STEPS`, by plans alone; mean of eight ranks."""
    drawn = Samples(num_ranks, 4, lengths_folder).lengths()
    rng = np.random.default_rng(0)
    homes = np.repeat(np.arange(num_ranks), SAMPLES_PER_RANK)
    met = [set[int]() for _ in range(8)]
    after = []
    for step in range(1, max(SHOWN_STEPS) + 1):
        destinations = _plan(rng.choice(drawn.ravel(), size=drawn.shape[1:])).destinations()
        for rank, others in enumerate(met):
            others |= {*destinations[homes == rank].tolist(), *homes[destinations == rank].tolist()} - {rank}
        if step in SHOWN_STEPS:
            after.append(statistics.fmean(map(len, met)))
    return after


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale.exchanges", description="Compares ways of exchanging, agreeing and planning."
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the results")
    parser.add_argument("--whole", action="store_true", help="up to 64 ranks")
    parser.add_argument("--lengths", type=Path, default=None, help="folder of real length sets")
    args = parser.parse_args()
    folder = None if args.lengths is None else find_lengths(args.lengths)
    out = ROOT / "build" / "bench" / "runs" / "exchanges"
    work = functools.partial(compare, NUM_STEPS, lengths_folder=folder)
    worlds = {
        str(num_ranks): summary(run_ranks(num_ranks, work=work, out=out))
        for num_ranks in (WHOLE_NUM_RANKS if args.whole else NUM_RANKS)
    }
    met = {str(num_ranks): ranks_met(num_ranks, lengths_folder=folder) for num_ranks in PLANNED_RANKS}
    work = functools.partial(plan_in_both_ways, lengths_folder=folder)
    plans = {str(num_ranks): summary_of_plans(run_ranks(num_ranks, work=work, out=out)) for num_ranks in NODE_RANKS}
    whole = " --whole" if args.whole else ""
    result = made_by(
        f"python -m benchmarks.scale.exchanges{whole}",
        cores=len(os.sched_getaffinity(0)),
        real_lengths=folder is not None,
        worlds=worlds,
        met=met,
        plans=plans,
    )
    problems = list(problems_of(result))
    sys.stdout.write("\n".join([write_results("exchanges", result, report=report, out=args.out), *problems, ""]))
    return 1 if problems else 0


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over ranks; of CPU seconds those of the barriers are taken off."""

    def mean(way: str, when: str, clock: int) -> float:
        return statistics.fmean(rank["ways"][way][when][clock] for rank in ranks)

    return {
        "ways": {
            way: {
                when: {"seconds": mean(way, when, 0), "cpu_seconds": mean(way, when, 1) - mean(NOTHING, "later", 1)}
                for when in ("first", "later")
            }
            for way in (*EXCHANGES, *AGREEMENTS)
        },
        "num_peers": statistics.fmean(rank["num_peers"] for rank in ranks),
        "met_and_sockets": [[rank["num_met"], rank["sockets"]] for rank in ranks],
    }


def problems_of(result: Mapping[str, Any]) -> Iterator[str]:
    """Ranks whose sockets for the messages are not one to each rank met, and one that listens."""
    for num_ranks, world in result["worlds"].items():
        for rank, (num_met, sockets) in enumerate(world["met_and_sockets"]):
            if sockets != 1 + num_met:
                yield f"rank {rank} of {num_ranks} has {sockets} sockets after it has met {num_met} ranks"


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    source = f"the real set {LENGTH_SET}" if result["real_lengths"] else f"synthetic:{LENGTH_SET}"
    command = f"{result['command']} --lengths FOLDER --out benchmarks/results"
    return f"""{page_head("Ways of exchanging, agreeing and planning", command)}
{SAMPLES_PER_RANK} samples a rank and step, {source}; mean of ranks and of {NUM_STEPS - 1} steps, and the first step, in
which ranks connect. CPU is that of a process, gloo's threads included, less what the barriers around it cost. All ways
in one run, in turn; times by the clock are those of processes that wait for a core. {versions_of(result)}.

{ways_table(result)}

Ranks that one has exchanged samples with, by the plans alone:

{met_table(result)}

A plan of {NUM_SAMPLES:,} samples for {DP_SIZE:,} data-parallel ranks, on {result["cores"]} cores: by each rank of a
node, or by the first, which broadcasts eight bytes a sample:

{plans_table(result["plans"])}
"""


def ways_table(result: Mapping[str, Any]) -> str:
    """Ways side by side."""
    ways = (*EXCHANGES, *AGREEMENTS)
    columns = " | ".join(
        (
            "ranks | of which exchange",
            *(f"{way}: CPU ms" for way in ways),
            *(f"{way}: ms" for way in ways),
            *(f"{way}: first CPU ms" for way in EXCHANGES),
        )
    )

    def ms(world: Mapping[str, Any], way: str, when: str, clock: str) -> str:
        return f"{1e3 * world['ways'][way][when][clock]:.2f}"

    rows = [
        (
            num_ranks,
            f"{world['num_peers']:.1f}",
            *(ms(world, way, "later", "cpu_seconds") for way in ways),
            *(ms(world, way, "later", "seconds") for way in ways),
            *(ms(world, way, "first", "cpu_seconds") for way in EXCHANGES),
        )
        for num_ranks, world in result["worlds"].items()
    ]
    return table(columns, rows, align="r" * (2 + 2 * len(ways) + len(EXCHANGES)))


def met_table(result: Mapping[str, Any]) -> str:
    """Ranks met after some steps."""
    columns = " | ".join(("data-parallel ranks", *(f"after step {step}" for step in SHOWN_STEPS)))
    rows = [(f"{int(num_ranks):,}", *(f"{num:,.0f}" for num in met)) for num_ranks, met in result["met"].items()]
    return table(columns, rows, align="r" * (1 + len(SHOWN_STEPS)))


if __name__ == "__main__":
    sys.exit(main())
