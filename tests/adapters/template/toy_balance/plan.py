"""Lengths of all ranks to a plan, and the plan in the host's own form."""

from collections.abc import Mapping

from torch import Tensor

from megatron_balance import DataSchedule, Limits, Topology, build_data_schedule
from megatron_balance.runtime import GatheredLengths
from toy_balance.settings import Settings


def plan_step(gathered: GatheredLengths, *, settings: Settings) -> DataSchedule:
    return build_data_schedule(
        gathered.lengths,
        cost_model=settings.cost_model,
        topology=Topology(len(gathered.num_samples_per_rank)),
        limits=Limits(settings.max_tokens),
        home_ranks=gathered.home_ranks,
    )


def microbatches_of(schedule: DataSchedule, *, rank: int, sequences: Mapping[int, Tensor]) -> list[list[Tensor]]:
    return [[sequences[index] for index in slot] for slot in schedule.ranks[rank]]
