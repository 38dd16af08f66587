"""Gathers lengths, and moves sequences to the ranks that the plan gives them."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from megatron_balance import DataSchedule
from megatron_balance.runtime import (
    GatheredLengths,
    Sample,
    check_same_schedule,
    gather_sample_lengths,
    reroute_samples,
)


def move_sequences(
    sequences: Sequence[Tensor], *, group: dist.ProcessGroup, plan: Callable[[GatheredLengths], DataSchedule]
) -> tuple[DataSchedule, dict[int, Tensor]]:
    samples = [Sample({"tokens": sequence}) for sequence in sequences]
    gathered = gather_sample_lengths(samples, group=group)
    schedule = plan(gathered)
    check_same_schedule(schedule.digest(), group=group)
    arrived = reroute_samples(samples, destinations=schedule.destinations(), gathered=gathered, group=group)
    return schedule, {index: sample.per_token["tokens"] for index, sample in arrived.items()}
