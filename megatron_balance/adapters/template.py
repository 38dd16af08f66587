"""An adapter to copy; docs/write-an-adapter.md says how. `install(max_tokens=…)` balances the toy host of its tests.

`Loader.load_step(group)` of `toy_host` returns the sequences of this rank. Three things are the host's own: the
settings, the table of hooks, and what a hook does with a plan. The kit does the rest: it checks the release and every
target, installs once, and undoes.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_balance import CostModel, Limits, Topology, build_data_schedule
from megatron_balance.adapters.kit import Function, Hook, Installation
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.failure import check_same_schedule
from megatron_balance.runtime.gather import gather_sample_lengths
from megatron_balance.samples.sample import Sample


@dataclass(frozen=True)
class Settings:
    """Every option, in one frozen object: from arguments here, or from the host's own flags."""

    cost_model: CostModel
    max_tokens: int


installation: Installation[Settings] = Installation("toy_host", versions=("1.2",), remedy="install 1.2")


def install(*, max_tokens: int, cost_model: CostModel | None = None) -> Installation[Settings]:
    """Hook the host in this process; what it returns has `undo()`."""
    settings = Settings(cost_model or CostModel.tokens(), max_tokens)
    return installation.install(settings, lambda: hooks_for(settings))


def hooks_for(settings: Settings) -> tuple[Hook, ...]:
    """The table: each row is checked before any is installed."""
    return (
        Hook(
            target="toy_host:Loader.load_step",
            parameters=("self", "group"),
            wrap=functools.partial(balanced_step, settings=settings),
            reason="the only place that has the sequences before they run",
            until="the host takes a planning function",
        ),
    )


def balanced_step(load_step: Function, *, settings: Settings) -> Function:
    """The host's function, with the sequences of all ranks moved by plan and packed under the cap."""

    @functools.wraps(load_step)
    def wrapper(loader: Any, group: dist.ProcessGroup) -> list[list[Tensor]]:
        samples = [Sample({"tokens": sequence}) for slot in load_step(loader, group) for sequence in slot]
        gathered = gather_sample_lengths(samples, group=group)
        # Every rank has the same lengths now, so every rank makes the same plan, or raises the same error.
        schedule = build_data_schedule(
            gathered.lengths,
            cost_model=settings.cost_model,
            topology=Topology(group.size()),
            limits=Limits(settings.max_tokens),
            home_ranks=gathered.home_ranks,
        )
        check_same_schedule(schedule.digest(), group=group)
        arrived = reroute_samples(samples, destinations=schedule.destinations(), gathered=gathered, group=group)
        return [[arrived[index].per_token["tokens"] for index in slot] for slot in schedule.ranks[group.rank()]]

    return wrapper
