"""Models a step and the start of any number of ranks, from measured costs and formulas for messages and bytes.

The preparing thread's seconds are its CPU seconds at that size (`alone.py`) and those of its collectives on a network
of stated latency and bandwidth (`traffic.py`). What is left of them when the step before has ended is exposed, and so
is what the training thread does itself. At the start one key-value store serves all ranks, one request after another.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.scale import traffic
from megatron_balance.runtime.gather import HEADER_FIELDS, INLINE_LENGTHS

MEETING_STEPS = 2000
"""Steps in which ranks still meet for the first time: after these, 10,000 data-parallel ranks have met."""


@dataclass(frozen=True)
class Network:
    """Between nodes."""

    latency: float = 25e-6
    node_bandwidth: float = 3e9
    ranks_per_node: int = 8

    def worse(self, factor: float) -> Network:
        """So many times the latency, and as much less bandwidth."""
        return replace(self, latency=self.latency * factor, node_bandwidth=self.node_bandwidth / factor)

    def seconds(self, nbytes: float) -> float:
        """Of bytes that leave this rank while all ranks of its node send."""
        return nbytes * self.ranks_per_node / self.node_bandwidth

    def in_turn(self, of: traffic.Traffic, *, rounds: int) -> float:
        """Seconds of messages in rounds, each of which waits for the last."""
        return rounds * self.latency + self.seconds(of.sent_nbytes + of.frames_sent_nbytes)

    def at_once(self, of: traffic.Traffic, *, message_seconds: float) -> float:
        """Seconds of messages that do not wait for one another; `message_seconds` of a CPU for each."""
        return (
            self.latency
            + (of.sent + of.received) * message_seconds
            + self.seconds(of.sent_nbytes + of.frames_sent_nbytes)
        )


@dataclass(frozen=True)
class Layout:
    """Ranks of the world."""

    num_ranks: int
    replica_size: int
    readers: int = 1

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.num_ranks // self.replica_size

    @property
    def num_reading(self) -> int:
        """Ranks of the world that read data."""
        return self.dp_size * self.readers

    @property
    def name(self) -> str:
        """Of the model's parallelism."""
        return {(1, 1): "none", (8, 1): "TP8", (8, 8): "PP8"}[self.replica_size, self.readers]


LAYOUTS = tuple(
    Layout(num_ranks, size, readers) for num_ranks in (64, 1024, 10_000) for size, readers in ((1, 1), (8, 1), (8, 8))
)
"""Data-parallel ranks alone, tensor parallelism and pipelines."""


def message_seconds(worlds: Sequence[Mapping[str, Any]]) -> float:
    """CPU seconds of gloo for one message, sent or received: the slope of a process's over the numbers of ranks."""
    grown = [world for world in worlds if world["replica_size"] == 1]
    messages = [_meetings(world["dp_size"], exchanged=world) for world in grown]
    counts = [sum(of.sent + of.received for of in each.values()) for each in messages]
    seconds = [world["cpu_seconds"] - world["stages"]["all"]["cpu_seconds"] for world in grown]
    return max(float(np.polyfit(counts, seconds, 1)[0]), 0.0)


def simulate_step(
    layout: Layout, *, measured: Mapping[str, Any], network: Network, step_seconds: float
) -> dict[str, float]:
    """Seconds of one step."""
    alone = next(one for one in measured["alone"] if one["num_ranks"] == layout.dp_size)
    of = _meetings(layout.dp_size, exchanged=alone)
    result = {
        "plan": alone["plan_seconds"],
        "cpu": alone["cpu_seconds"]["all"] - alone["cpu_seconds"]["plan"],
        "gather": network.in_turn(of["gather"], rounds=layout.dp_size - 1),
        "exchange": network.at_once(of["exchange"], message_seconds=measured["message_seconds"]),
        "agree": network.in_turn(of["agree"], rounds=2 * _depth(layout.dp_size)),
    }
    num_firsts, tp_size = layout.readers, layout.replica_size // layout.readers
    shared = traffic.share_among_firsts(num_firsts, rank=0, num_numbers=0)
    # The rows reach the replica's first at once, and the outcome goes down two trees.
    result["share"] = network.at_once(shared, message_seconds=measured["message_seconds"]) if num_firsts > 1 else 0.0
    result["share"] += _depth(num_firsts) * network.latency + _depth(tp_size) * network.latency
    result["all"] = sum(result[name] for name in ("plan", "cpu", "gather", "exchange", "agree", "share"))
    exposed = measured["exposed_cpu_seconds"] + max(result["all"] - step_seconds, 0.0)
    exposed += _depth(tp_size) * network.latency  # the choice of the rank that loads
    return result | {"exposed": exposed, "exposed_share": exposed / step_seconds}


@dataclass(frozen=True)
class GlooGroup:
    """One kind of this package's process groups."""

    size: int
    num_members: int
    edges: int
    exchanges: bool = False

    @property
    def reads_at_once(self) -> int:
        """Reads of the store where all ranks of a group connect when it is made: each member reads for each."""
        return self.num_members * self.size

    def reads_when_they_meet(self, *, num_peers: float, step: int) -> float:
        """Reads in one step where two ranks connect when they first talk: both ends of a connection."""
        new = float(self.edges if step == 1 else 0)
        if self.exchanges:
            apart = self.size * (self.size - 1) / 2 - self.edges
            exchanging = 1 - (1 - num_peers / (self.size - 1)) ** 2  # one sends to the other, or both do
            new += apart * (1 - exchanging) ** (step - 1) * exchanging
        return self.num_members // self.size * 2 * new


def gloo_groups(layout: Layout) -> tuple[GlooGroup, ...]:
    """A data-parallel group, with a ring, the rounds of an agreement, and the exchange; the firsts of a replica, with a
    star and a tree; a tensor-parallel group, with a tree; those that log, a star and a tree.
    """
    dp, firsts, reading = layout.dp_size, layout.readers, layout.num_reading
    tp = layout.replica_size // firsts
    groups = (
        GlooGroup(dp, reading, edges=dp * len(traffic.peers_of_largest_row(dp, rank=0)) // 2, exchanges=True),
        GlooGroup(firsts, reading, edges=min(2 * (firsts - 1), firsts * (firsts - 1) // 2)),
        GlooGroup(tp, layout.num_ranks, edges=tp - 1),
        GlooGroup(reading, reading, edges=2 * (reading - 1)),
    )
    return tuple(group for group in groups if group.size > 1)


def num_meetings(layout: Layout) -> int:
    """Of all ranks in the store before the first step: flags, ranks of a node, and one for each kind of group."""
    return 2 + len(gloo_groups(layout))


def simulate_start(layout: Layout, *, measured: Mapping[str, Any], step_seconds: float) -> dict[str, float]:
    """Seconds of the start, of which rank 0's store is the bottleneck."""
    startup = measured["startup"]
    meeting = startup["meetings"][str(layout.num_ranks)]
    answers = layout.num_ranks * _at(startup["store_seconds"], meeting["answer_nbytes"])
    groups = gloo_groups(layout)
    num_groups = sum(group.num_members // group.size for group in groups)
    alone = next(one for one in measured["alone"] if one["num_ranks"] == layout.dp_size)
    reads = [
        sum(group.reads_when_they_meet(num_peers=alone["num_peers"], step=step) for group in groups)
        for step in range(1, MEETING_STEPS + 1)
    ]
    seconds = np.array(reads) * _at(startup["store_seconds"], mesh_value_nbytes(0))
    star = math.ceil(math.log2(layout.num_reading)) + 1
    return {
        "meetings": num_meetings(layout) * (meeting["first_rank"] + answers),
        "groups": num_groups * startup["group_seconds"],
        "at_once": sum(
            group.reads_at_once * _at(startup["store_seconds"], mesh_value_nbytes(group.size)) for group in groups
        ),
        "first_step": float(seconds[0]),
        "later": float(np.maximum(seconds[1:] - step_seconds, 0.0).sum()),
        "reads_at_once": sum(group.reads_at_once for group in groups),
        "reads_first_step": reads[0],
        "reads_second_step": reads[1],
        "files": open_files([group.size for group in groups]),
        "files_of_others": open_files([*(group.size for group in groups[:-1]), star]),
    }


def open_files(group_sizes: Sequence[int]) -> int:
    """Of a rank that is connected to all ranks of its gloo groups, and to its planning process.

    A group has sockets to the others, one that listens, and three files by which gloo waits for them.
    """
    return sum(size + 3 for size in group_sizes) + 1


def mesh_value_nbytes(group_size: int) -> int:
    """Bytes that a rank of a gloo group publishes for the others: its address, and a number for each of them where all
    connect at once.
    """
    return 154 + 8 * group_size


def _meetings(dp_size: int, *, exchanged: Mapping[str, Any]) -> dict[str, traffic.Traffic]:
    """Of one step; a rank receives as much as it sends."""
    peers, nbytes = round(exchanged["num_peers"]), int(exchanged["sent_nbytes"])
    return {
        "gather": traffic.gather_lengths(dp_size, row_values=INLINE_LENGTHS, header_fields=HEADER_FIELDS),
        "exchange": traffic.Traffic(peers, peers, nbytes, nbytes),
        "agree": traffic.agree(dp_size) + traffic.agree(dp_size),
    }


def _depth(num_ranks: int) -> int:
    """Rounds of a broadcast."""
    return (num_ranks - 1).bit_length()


def _at(seconds: Mapping[str, float], nbytes: int) -> float:
    """Measured seconds of requests by their bytes, and lines between them."""
    sizes = sorted(map(int, seconds))
    return float(np.interp(nbytes, sizes, [seconds[str(size)] for size in sizes]))
