"""recsys-examples adapter: the batch shuffler of its HSTU and SID-GR trainings, driven by this package's planner.

`install()` puts this planner and this exchange behind every balanced shuffler of that repository, and registers one
more, "megatron_balance". Importing this patches nothing and needs no torchrec.

Invariants: all of it is in place or none; `undo()` restores the original functions and unregisters the name.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_balance.adapters.kit import Function, Hook, Installation
from megatron_balance.errors import BalanceError

__all__ = ["NAME", "install", "is_installed"]

NAME = "megatron_balance"
"""The shuffler's name in upstream's BatchShufflerFactory."""

_SHUFFLERS = "commons.distributed.batch_shuffler"
_FACTORY = "commons.distributed.batch_shuffler_factory"
_TASKS = "commons.perf_model.task_estimator"

installation: Installation[str] = Installation(
    "recsys-examples", remedy="PYTHONPATH must name the examples folder of recsys-examples, and torchrec be installed"
)
is_installed = installation.is_installed


def install() -> Installation[str]:
    """Hook recsys-examples in this process. Installing twice installs once.

    Call it on every rank before a shuffler is made; a checkout's `examples` folder must be in the path, as it is when
    its trainings run.

    Raises:
        BalanceError: recsys-examples is missing or differs from what is expected. Nothing is changed then.
    """
    if not is_installed():
        installation.install(NAME, _hooks, end=_unregister)
        from megatron_balance.adapters.recsys.shuffler import make_shuffler_class

        stock = importlib.import_module(_SHUFFLERS).BaseTaskBalancedBatchShuffler
        if not _factory().is_registered(NAME):
            # Configurations name the shuffler where balancing is switched off, too: it shuffles as upstream's do then.
            _factory().register(NAME, make_shuffler_class(stock))
    return installation


def _unregister() -> None:
    # Shufflers already made under the name keep working.
    if _factory().is_registered(NAME):
        _factory().unregister(NAME)


def _factory() -> Any:
    return importlib.import_module(_FACTORY).BatchShufflerFactory


def _hooks() -> list[Hook]:
    try:
        from megatron_balance.adapters.recsys import shuffler
    except ModuleNotFoundError as error:
        raise BalanceError(f"recsys-examples needs {error.name}, which is not installed: install torchrec.") from error

    def task_flops(model: str) -> Function:
        def get_workloads(
            _: Function, self: Any, seqlen: Any, num_heads: int | None = 1, head_dim: int | None = 1
        ) -> Any:
            cost_model = shuffler.layer_cost(model, num_heads=num_heads or 1, head_dim=head_dim or 1)
            return shuffler.workloads(seqlen, cost_model=cost_model)

        return get_workloads

    reason = "padding has a mask, weights and shapes are kept, indices describe the order; int32 lengths do not wrap"
    shuffler_class = f"{_SHUFFLERS}:BaseTaskBalancedBatchShuffler"
    rows: dict[str, Function] = {
        f"{shuffler_class}.shuffle": shuffler.shuffle,
        f"{shuffler_class}.start_shuffle_async": shuffler.start_shuffle_async,
        f"{shuffler_class}.finish_shuffle": shuffler.finish_shuffle,
        f"{_TASKS}:HSTUAttentionTask.get_workloads": task_flops("hstu"),
        f"{_TASKS}:SelfAttentionTask.get_workloads": task_flops("sid_gr"),
    }
    return [Hook.around(target, balanced, reason=reason) for target, balanced in rows.items()]
