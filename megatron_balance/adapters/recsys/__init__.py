"""recsys-examples adapter: the batch shuffler of its HSTU and SID-GR trainings, driven by this package's planner.

`install()` puts this planner and this exchange behind every balanced shuffler of that repository, and registers one
more, "megatron_balance". Importing this patches nothing and needs no torchrec.

Invariants: all of it is in place or none; `undo()` restores the original functions and unregisters the name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_balance.adapters.kit import Adapter, Hook
from megatron_balance.errors import BalanceError

__all__ = ["NAME", "install", "is_installed"]

NAME = "megatron_balance"
"""The shuffler's name in upstream's BatchShufflerFactory."""

_SHUFFLER = "commons.distributed.batch_shuffler:BaseTaskBalancedBatchShuffler"
_FACTORY = "commons.distributed.batch_shuffler_factory"
_TASKS = "commons.perf_model.task_estimator"


def _find_version() -> str:
    """The folder of recsys-examples, which has no version, and the version of torchrec."""
    try:
        folder = Path(importlib.import_module(_FACTORY).__file__ or "").parents[2]
    except ModuleNotFoundError as error:
        raise BalanceError(
            f"cannot import {_FACTORY} ({error}): PYTHONPATH must name the examples folder of recsys-examples."
        ) from error
    return f"in {folder} (torchrec {metadata.version('torchrec')})"


adapter: Adapter[str] = Adapter("recsys-examples", find_version=_find_version)


def install() -> Adapter[str]:
    """Hook recsys-examples in this process. Installing twice installs once.

    Call it on every rank before a shuffler is made; a checkout's `examples` folder must be in the path, as it is when
    its trainings run.

    Raises:
        BalanceError: recsys-examples is missing or differs from what is expected. Nothing is changed then.
    """
    if not adapter.is_installed:
        adapter.hook(NAME, _hooks, check=_check_name)
        from megatron_balance.adapters.recsys.shuffler import make_shuffler_class

        module, _, name = _SHUFFLER.partition(":")
        _factory().register(NAME, make_shuffler_class(getattr(importlib.import_module(module), name)))
        adapter.add(_Registration())
    return adapter


def is_installed() -> bool:
    """True if the adapter is in place."""
    return adapter.is_installed


class _Registration:
    def undo(self) -> None:
        # Shufflers already made under the name keep working.
        if _factory().is_registered(NAME):
            _factory().unregister(NAME)


def _factory() -> Any:
    return importlib.import_module(_FACTORY).BatchShufflerFactory


def _check_name() -> None:
    if _factory().is_registered(NAME):
        raise BalanceError(f"a batch shuffler {NAME!r} is registered already: unregister it, or leave this one out.")


def _hooks() -> list[Hook]:
    from megatron_balance.adapters.recsys import shuffler  # needs torchrec

    def flops_of(model: str) -> Callable[..., Any]:
        def get_workloads(self: Any, seqlen: Any, num_heads: int | None = 1, head_dim: int | None = 1) -> Any:
            del self
            cost_model = shuffler.layer_cost(model, num_heads=num_heads or 1, head_dim=head_dim or 1)
            return shuffler.workloads(seqlen, cost_model=cost_model)

        return get_workloads

    def row(owner: str, name: str, parameters: str, *, function: Callable[..., Any], why: str) -> Hook:
        return Hook(
            target=f"{owner}.{name}",
            bound_in=(owner,),
            parameters=("self", *parameters.split()),
            wrap=lambda _: function,
            why=why,
            until="upstream's own tests of its balancers pass",
        )

    signatures = {
        shuffler.shuffle: "batch pg_group return_indices return_workloads use_all2all",
        shuffler.start_shuffle_async: "batch pg_group",
        shuffler.finish_shuffle: "batch handle pg_group use_all2all",
    }
    kept = "an explicit mask of padding, weights and shapes kept, indices that describe the order"
    return [
        row(_SHUFFLER, function.__name__, parameters, function=function, why=kept)
        for function, parameters in signatures.items()
    ] + [
        row(
            f"{_TASKS}:{task}",
            "get_workloads",
            "seqlen num_heads head_dim",
            function=flops_of(model),
            why="int32 lengths wrap, and attention is counted once a head too often",
        )
        for task, model in (("HSTUAttentionTask", "hstu"), ("SelfAttentionTask", "sid_gr"))
    ]
