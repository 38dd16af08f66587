"""One rank's CPU work for a step of any number of ranks: the real planner with collectives that answer at once.

What the other ranks would send is put in place of gloo's answer, so all that this package computes in a step runs at
its true size in one process: headers of all ranks, the plan, the bytes that leave and arrive, the packing.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scale.samples import item_of, planner_settings
from benchmarks.scale.stages import STAGES, StageTimes
from megatron_balance.mcore.prepare import StepBuilder
from megatron_balance.runtime import comm


def measure_alone(batches: NDArray[Any]) -> dict[str, Any]:
    """Medians over steps but the first, which starts the planning process."""
    num_ranks = batches.shape[1]
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    times = StageTimes()
    try:
        settings = planner_settings(num_ranks)
        group = dist.group.WORLD
        assert group is not None, "initialised"
        builder = StepBuilder(settings, dp_group=group)
        for lengths in batches:
            items = [item_of(length) for length in lengths[0].tolist()]
            with answered(lengths), times.installed():
                builder.build(items)
    finally:
        dist.destroy_process_group()
    steps = times.steps[1:]
    cpu = {stage: statistics.median(step[stage][1] for step in steps) for stage in (*STAGES, "all")}
    return {
        "num_ranks": num_ranks,
        "cpu_seconds": cpu | {"split": cpu["all"] - sum(cpu[stage] for stage in STAGES)},
        "plan_seconds": min(step["plan"][0] for step in steps),
        "sent_nbytes": statistics.median(times.sent_nbytes),
        "num_peers": statistics.median(times.num_peers),
    }


@contextlib.contextmanager
def answered(lengths: NDArray[Any]) -> Iterator[None]:
    """Collectives that return what ranks with these lengths would send, whose other values are those of rank 0."""
    inner = dist.all_gather_into_tensor, dist.irecv, comm._timeout_of
    all_lengths = torch.from_numpy(lengths).view(torch.uint8)

    def all_gather(gathered: torch.Tensor, row: torch.Tensor, **_: Any) -> None:
        rows = gathered.view(len(lengths), -1)
        rows[:] = row
        if row.dtype == torch.uint8:  # lengths are at the end
            rows[:, -all_lengths.shape[1] :] = all_lengths

    def irecv(received: torch.Tensor, **keywords: Any) -> Any:
        # Zeros in place of samples; in an agreement a rank that is fine and has no plan.
        received.fill_(-1 if received.dtype.is_signed else 0)
        return inner[1](received, **keywords)

    dist.all_gather_into_tensor, dist.irecv = all_gather, irecv
    comm._timeout_of = lambda _: timedelta(minutes=1)  # torch's fake groups have none
    try:
        yield
    finally:
        dist.all_gather_into_tensor, dist.irecv, comm._timeout_of = inner
