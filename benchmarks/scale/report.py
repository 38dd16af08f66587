"""The page of the growth benchmark: tables made from its figures alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import table
from benchmarks.results_file import page_head, versions_of
from benchmarks.scale.simulated import Network
from benchmarks.scale.stages import STAGES

MIB = 2**20


def report(result: Mapping[str, Any]) -> str:
    """The page."""
    network = Network()
    lengths = result["lengths"]
    source = f"the real set {lengths['name']}" if lengths["real"] else f"synthetic:{lengths['name']}"
    return f"""{page_head("Growth with the number of ranks", f"{result['command']} --out benchmarks/results")}
{lengths["per_rank"]} samples a rank and step, {source}, at most {lengths["cap"]} tokens each; {versions_of(result)}.

## Measured

Every rank is a process, all on {result["cores"]} cores; a step is a sleep of {result["step_seconds"]:g} s.

{measured_table(result)}

CPU ms of a step's stages, in the preparing thread:

{stages_table(result)}

One rank alone, the answers of the others put in place of gloo's:

{alone_table(result)}

## Modelled

{1e6 * network.latency:.0f} µs a message and {network.node_bandwidth / 1e9:g} GB/s for a node of
{network.ranks_per_node} ranks; {1e6 * result["message_seconds"]:.0f} µs of CPU a message, measured above.

{simulated_table(result)}

The start:

{start_table(result)}

What gloo reads from the store to make a group and gather once, measured:

{mesh_table(result)}
"""


def measured_table(result: Mapping[str, Any]) -> str:
    """Measurements of ranks of this machine."""
    columns = (
        "ranks | of a replica | exposed ms, median | longest | its share | exposed CPU ms | thread ms | thread CPU ms "
        "| process CPU ms | KiB sent | to ranks | more sockets | more MiB | groups made, s"
    )
    rows = [
        (
            world["num_ranks"],
            world["replica_size"],
            _ms(world["exposed_seconds"]["p50"]),
            _ms(world["exposed_seconds"]["max"]),
            f"{world['exposed_seconds']['p50'] / result['step_seconds']:.3%}",
            _ms(world["exposed_cpu_seconds"]),
            _ms(world["stages"]["all"]["seconds"]),
            _ms(world["stages"]["all"]["cpu_seconds"]),
            _ms(world["cpu_seconds"]),
            f"{world['sent_nbytes'] / 1024:.0f}",
            f"{world['num_peers']:.1f}",
            world["more_sockets"],
            f"{world['more_private_bytes'] / MIB:.1f}",
            f"{world['groups_seconds']:.2f}",
        )
        for world in result["worlds"]
    ]
    return table(columns, rows, align="r" * 14)


def stages_table(result: Mapping[str, Any]) -> str:
    """CPU ms of each stage."""
    stages = list(STAGES)
    columns = " | ".join(("ranks", "of a replica", *stages, "the rest"))
    rows = [
        (
            world["num_ranks"],
            world["replica_size"],
            *(_ms(_cpu(world, stage)) for stage in stages),
            _ms(_cpu(world, "all") - sum(_cpu(world, stage) for stage in stages)),
        )
        for world in result["worlds"]
    ]
    return table(columns, rows, align="r" * (3 + len(stages)))


def alone_table(result: Mapping[str, Any]) -> str:
    """CPU ms of one rank at any size."""
    stages = (*(stage for stage in STAGES if stage != "plan"), "split")
    columns = " | ".join(
        ("data-parallel ranks", "plan ms", *(f"{stage} CPU ms" for stage in stages), "KiB sent", "to ranks")
    )
    rows = [
        (
            f"{one['num_ranks']:,}",
            _ms(one["plan_seconds"]),
            *(_ms(one["cpu_seconds"][stage]) for stage in stages),
            f"{one['sent_nbytes'] / 1024:.0f}",
            f"{one['num_peers']:.0f}",
        )
        for one in result["alone"]
    ]
    return table(columns, rows, align="r" * (4 + len(stages)))


_PARTS_OF_STEP = "plan", "cpu", "gather", "exchange", "agree", "share", "all", "exposed"


def simulated_table(result: Mapping[str, Any]) -> str:
    """Modelled steps."""
    columns = (
        "ranks | model | plan ms | other CPU ms | gather ms | exchange ms | agree ms | share ms | thread ms "
        "| exposed ms | its share | thread ms on a network 4 times worse | exposed share there"
    )
    rows = [
        (
            f"{one['num_ranks']:,}",
            one["parallelism"],
            *(_ms(one["step"][name]) for name in _PARTS_OF_STEP),
            f"{one['step']['exposed_share']:.3%}",
            _ms(one["worse"]["all"]),
            f"{one['worse']['exposed_share']:.3%}",
        )
        for one in result["simulated"]
    ]
    return table(columns, rows, align="rl" + "r" * 11)


def start_table(result: Mapping[str, Any]) -> str:
    """Modelled starts."""
    columns = (
        "ranks | model | meetings in the store, s | groups of others, s | gloo connected at once: reads of the store "
        "| s | when ranks first talk: reads in the first step | s | in the second | later steps longer by, s "
        "| open files of rank 0 | of the others"
    )
    rows = [
        (
            f"{one['num_ranks']:,}",
            one["parallelism"],
            f"{one['start']['meetings']:.1f}",
            f"{one['start']['groups']:.3f}",
            f"{one['start']['reads_at_once']:,}",
            f"{one['start']['at_once']:,.0f}",
            f"{one['start']['reads_first_step']:,.0f}",
            f"{one['start']['first_step']:,.0f}",
            f"{one['start']['reads_second_step']:,.0f}",
            f"{one['start']['later']:,.0f}",
            f"{one['start']['files']:,}",
            f"{one['start']['files_of_others']:,}",
        )
        for one in result["simulated"]
    ]
    return table(columns, rows, align="rl" + "r" * 10)


def mesh_table(result: Mapping[str, Any]) -> str:
    """Requests of gloo to the store."""
    rows = [
        (
            one["num_ranks"],
            "when they first talk" if one["lazy"] else "at once",
            f"{one['reads']:.0f}",
            f"{one['read_nbytes']:.0f}",
            f"{one['files']:.0f}",
        )
        for one in result["startup"]["meshes"]
    ]
    return table("ranks | connected | reads of a rank | bytes read | open files", rows, align="rlrrr")


def _cpu(world: Mapping[str, Any], stage: str) -> float:
    return world["stages"][stage]["cpu_seconds"]


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.2g}"
