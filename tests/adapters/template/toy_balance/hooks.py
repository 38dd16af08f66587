"""The table of hooks, and how it is installed."""

import functools
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_balance import CostModel
from megatron_balance.hooking import Function, Hook, Installation, Patches, check_version, install_hooks
from toy_balance.plan import microbatches_of, plan_step
from toy_balance.settings import Settings
from toy_balance.transport import move_sequences

installation: Installation[Settings] = Installation("toy_host")


def install(*, max_tokens: int, cost_model: CostModel | None = None) -> Installation[Settings]:
    settings = Settings(cost_model or CostModel.tokens(), max_tokens)
    return installation.install(settings, hook=lambda: _hook(settings))


def _hook(settings: Settings) -> Patches:
    import toy_host

    version = check_version(toy_host.__version__, system="toy_host", supported=("1.2",), remedy="install 1.2")
    return install_hooks(hooks_for(settings), version=f"toy_host {version}")


def hooks_for(settings: Settings) -> tuple[Hook, ...]:
    return (
        Hook(
            target="toy_host:Loader.load_step",
            bound_in=("toy_host:Loader",),
            parameters=("self", "group"),
            wrap=functools.partial(balanced_step, settings=settings),
            why="the only place that has the sequences before they run",
            until="the host takes a planning function",
        ),
    )


def balanced_step(load_step: Function, *, settings: Settings) -> Function:
    @functools.wraps(load_step)
    def wrapper(loader: Any, group: dist.ProcessGroup) -> list[list[Tensor]]:
        sequences = [sequence for slot in load_step(loader, group) for sequence in slot]
        schedule, arrived = move_sequences(sequences, group=group, plan=lambda rows: plan_step(rows, settings=settings))
        return microbatches_of(schedule, rank=group.rank(), sequences=arrived)

    return wrapper
