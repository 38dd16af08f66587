"""One gloo rank without a model that counts its meetings: run by `meetings.py` and by the tests.

Prefetcher, planner and figures are the real ones. Collectives are counted where torch.distributed
is called, their bytes by the kernel as well.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.scale import traffic
from benchmarks.scale.counted import counted_collectives
from benchmarks.scale.samples import item_of
from benchmarks.scale.traffic import Traffic
from megatron_balance.cost.model import CostModel
from megatron_balance.lengths.synthetic import synthetic_lengths
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.mcore.telemetry.figures import Figures
from megatron_balance.mcore.telemetry.run_metrics import RunMetrics
from megatron_balance.runtime.gather import HEADER_FIELDS, INLINE_LENGTHS
from megatron_balance.runtime.rank_seconds import NOT_MEASURING
from megatron_balance.runtime.replica import Replica
from megatron_balance.samples.sample import SampleSchema
from megatron_balance.samples.unpacking import split_packed
from megatron_balance.samples.wire import block_nbytes
from megatron_balance.topology import Limits, Topology

CAP = 8192
SAMPLES_PER_RANK = 4
NUM_STEPS = 9
"""Online calibration fits before steps 4 and 8."""

TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class World:
    """Ranks: the first of each `replica_size` consecutive ones reads data, as under tensor parallelism."""

    num_ranks: int
    replica_size: int

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.num_ranks // self.replica_size

    def __str__(self) -> str:
        """`DP4` or `TP2×DP4`."""
        return f"DP{self.dp_size}" if self.replica_size == 1 else f"TP{self.replica_size}×DP{self.dp_size}"


def meet(world: World) -> dict[str, Any]:
    """Run steps as one rank of an initialised world, and count."""
    own = dist.get_rank()
    lane, replica = own % world.replica_size, own // world.replica_size
    reads = lane == 0
    readers = list(range(0, world.num_ranks, world.replica_size))
    measuring = sorted({*readers, world.num_ranks - 1})
    before = set(tcp_sockets())
    dp_group = lazy_group([readers])
    replica_group = None
    if world.replica_size > 1:
        replica_group = lazy_group([list(range(first, first + world.replica_size)) for first in readers])
    figures_group = lazy_group([measuring])

    costs = CostModel(linear=1000, quadratic=1)
    config = BalanceConfig(
        use_dynamic_batch_size=True, max_tokens_per_gpu=CAP, balance_data=True, balance_by_flops=True
    )
    planner = StepPlanner(
        config,
        topology=Topology(world.dp_size),
        limits=Limits(CAP),
        cost_model=costs,
        dp_group=dp_group,
        timeout=TIMEOUT,
    )
    prefetcher = StepPrefetcher(planner, replica=Replica(tensor=replica_group))
    metrics = None
    if figures_group is not None:
        metrics = RunMetrics(
            RunLog(enabled=False),
            log_interval=1,
            group=figures_group,
            dp_rank=replica if reads else NOT_MEASURING,
            dp_size=world.dp_size,
        )
    source = _rows(world, replica=replica) if reads else None
    in_training: Counter[str] = Counter()
    steps: list[BalancedStep] = []
    with counted_collectives() as calls:
        for iteration in range(1, NUM_STEPS + 1):
            seen = len(calls)
            steps.append(prefetcher.balance(source, num_microbatches=SAMPLES_PER_RANK))
            if metrics is not None:
                metrics.begin(steps[-1], iteration=iteration)
            if iteration < NUM_STEPS:
                prefetcher.prepare(source, num_microbatches=SAMPLES_PER_RANK)
            if metrics is not None:
                metrics.logged(iteration)
            if iteration > 2:  # until the iterator has come twice, nothing is prepared
                in_training.update(call.kind for call in calls[seen:] if call.in_training)
        if metrics is not None:
            metrics.flush()
    dist.barrier()
    made = [sent for name, sent in tcp_sockets().items() if name not in before]
    return {
        "calls": dict(Counter(call.kind for call in calls)),
        "in_training": dict(in_training),
        "traffic": vars(sum((call.traffic for call in calls), Traffic())),
        "sockets": len(made),
        "tcp_sent_nbytes": sum(made),
        "expected": _expected(world, steps=steps, place=measuring.index(own) if own in measuring else None),
    }


def _expected(world: World, *, steps: Sequence[BalancedStep], place: int | None) -> dict[str, Any]:
    """The formulas for this rank; `place` among those that measure."""
    own = dist.get_rank()
    lane, replica = own % world.replica_size, own // world.replica_size
    calls: Counter[str] = Counter()
    total = Traffic()
    exchanged: set[int] = set()
    if lane == 0:
        row_nbytes = traffic.gather_lengths(world.dp_size, row_values=INLINE_LENGTHS, header_fields=HEADER_FIELDS)
        for step in steps:
            sent, received = _moved_nbytes(step, rank=replica)
            messages = traffic.exchange(sent_nbytes=sent, received_nbytes=received)
            messages += traffic.agree(world.dp_size) + traffic.agree(world.dp_size)
            total += row_nbytes + messages
            calls.update(all_gather_into_tensor=1, isend=messages.sent, irecv=messages.received)
            exchanged |= {*sent, *received}
    chosen = Counter[str]()
    if world.replica_size > 1:
        for step in steps:
            total += traffic.pass_on(world.replica_size, rank=lane, num_numbers=1 + step.num_microbatches)
            total += traffic.choose(world.replica_size, rank=lane)
            calls["broadcast"] += 2
        chosen["broadcast"] = NUM_STEPS - 2
    num_measuring = world.dp_size + (world.replica_size > 1)
    if place is not None:
        num_figures = len(Figures().row())
        for _ in steps:
            total += traffic.log_figures(num_measuring, rank=place, num_steps=1, num_figures=num_figures)
            calls.update(("gather", "broadcast"))
    met: list[set[int]] = []
    if lane == 0:
        ring = traffic.peers_of_all_gather(world.dp_size, rank=replica)
        met.append(ring | traffic.peers_of_largest_row(world.dp_size, rank=replica) | exchanged)
        met.append(_peers_of_rounds(world.dp_size, rank=replica))
    if world.replica_size > 1:
        met.append(traffic.peers_of_broadcast(world.replica_size, rank=lane))
    if place is not None:
        met.append(_peers_of_rounds(num_measuring, rank=place))
    return {
        "calls": dict(calls),
        "in_training": dict(chosen),
        "traffic": vars(total),
        "sockets": traffic.sockets(met),
    }


def _peers_of_rounds(num_ranks: int, *, rank: int) -> set[int]:
    """Ranks met where values are gathered on the first rank and their sum is broadcast."""
    return traffic.peers_of_gather(num_ranks, rank=rank) | traffic.peers_of_broadcast(num_ranks, rank=rank)


def _moved_nbytes(step: BalancedStep, *, rank: int) -> tuple[dict[int, int], dict[int, int]]:
    """Rank → bytes of samples that leave for it, and that arrive from it."""
    schedule = step.schedule
    assert schedule is not None, "this rank plans"
    assert schedule.home_ranks is not None, "gathered"
    homes, destinations = schedule.home_ranks, schedule.destinations()

    def nbytes(*, of: NDArray[np.int64], there: NDArray[np.int64]) -> dict[int, int]:
        return {
            other: block_nbytes(_SCHEMA, lengths=schedule.lengths[(of == rank) & (there == other)].tolist())
            for other in {*there[of == rank].tolist()} - {rank}
        }

    return nbytes(of=homes, there=destinations), nbytes(of=destinations, there=homes)


_SCHEMA: SampleSchema = SampleSchema.of(split_packed(item_of(1), unit="segment")[0])


def _rows(world: World, *, replica: int) -> Iterator[dict[str, Tensor]]:
    """All rows of one data-parallel rank."""
    shape = NUM_STEPS, world.dp_size, SAMPLES_PER_RANK
    lengths = np.minimum(synthetic_lengths("reasoning_gym", num_samples=int(np.prod(shape)), seed=0), CAP)
    return iter([item_of(length) for length in lengths.reshape(shape)[:, replica].ravel().tolist()])


def lazy_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """This rank's group of these, which every rank makes; None where it is in none."""
    own = None
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as `split_world`
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="gloo", timeout=TIMEOUT)
        if dist.get_rank() in ranks:
            assert isinstance(group, dist.ProcessGroup), "this rank is a member"
            own = group
    return own


_TCP_INFO_NBYTES = 232
_BYTES_SENT = 200
"""Place of tcpi_bytes_sent, tcpi_bytes_retrans in Linux's struct tcp_info (linux/tcp.h), since 4.19."""


def tcp_sockets() -> dict[str, int]:
    """The TCP sockets of this process: name → bytes sent so far, each once."""
    found: dict[str, int] = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{entry}")
        except FileNotFoundError:  # the listing's own
            continue
        if not name.startswith("socket:"):
            continue
        with closing(socket.socket(fileno=os.dup(int(entry)))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
                sent, sent_again = struct.unpack_from("QQ", info, _BYTES_SENT)
                found[name] = sent - sent_again
    return found
