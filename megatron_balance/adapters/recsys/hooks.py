"""The hooks in recsys-examples, in a checked table, and the shuffler registered beside upstream's.

Invariants: all of it is in place or none; `undo()` restores the original functions and unregisters the name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_balance.adapters.recsys.settings import Settings
from megatron_balance.errors import BalanceError
from megatron_balance.hooking.installation import Installation
from megatron_balance.hooking.patches import Hook, Patches
from megatron_balance.hooking.patches import install as install_hooks

_SHUFFLER = "commons.distributed.batch_shuffler:BaseTaskBalancedBatchShuffler"
_FACTORY = "commons.distributed.batch_shuffler_factory"
_TASKS = "commons.perf_model.task_estimator"

Installed = Installation[Settings]
"""The type of what `install()` returns."""

installation: Installed = Installation("recsys-examples")


def install() -> Installed:
    """Hook recsys-examples in this process. Installing twice installs once.

    Call it on every rank before a shuffler is made; a checkout's `examples` folder must be in the path, as it is when
    its trainings run.

    Raises:
        BalanceError: recsys-examples is missing or differs from what is expected. Nothing is changed then.
    """
    settings = Settings()
    return installation.install(settings, hook=lambda: _hook_and_register(settings.name))


def is_installed() -> bool:
    """True if the adapter is in place."""
    return installation.settings is not None


@dataclass(frozen=True)
class _HookedAndRegistered:
    patches: Patches
    factory: Any
    name: str

    def undo(self) -> None:
        # Shufflers already made under the name keep working.
        self.patches.undo()
        if self.factory.is_registered(self.name):
            self.factory.unregister(self.name)


def _hook_and_register(name: str) -> _HookedAndRegistered:
    factory = _find_factory()
    if factory.is_registered(name):
        raise BalanceError(f"a batch shuffler {name!r} is registered already, as {factory.list_available()[name]}.")
    # Imported here, since it needs torchrec.
    from megatron_balance.adapters.recsys import shuffler

    patches = install_hooks(_hooks(shuffler), version=_version())
    base = importlib.import_module(_SHUFFLER.split(":")[0]).BaseTaskBalancedBatchShuffler
    factory.register(name, shuffler.make_shuffler_class(base))
    return _HookedAndRegistered(patches, factory, name)


def _hooks(shuffler: Any) -> list[Hook]:
    from megatron_balance.adapters.recsys.workloads import layer_cost, workloads

    def flops_of(model: str) -> Callable[..., Any]:
        def get_workloads(self: Any, seqlen: Any, num_heads: int | None = 1, head_dim: int | None = 1) -> Any:
            del self
            cost_model = layer_cost(model, num_heads=num_heads or 1, head_dim=head_dim or 1)
            return workloads(seqlen, cost_model=cost_model)

        return get_workloads

    def replace(function: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda _: function

    until = "upstream's own tests of its balancers pass"
    rows = [
        ("shuffle", ("self", "batch", "pg_group", "return_indices", "return_workloads", "use_all2all")),
        ("start_shuffle_async", ("self", "batch", "pg_group")),
        ("finish_shuffle", ("self", "batch", "handle", "pg_group", "use_all2all")),
    ]
    hooks = [
        Hook(
            target=f"{_SHUFFLER}.{name}",
            bound_in=(_SHUFFLER,),
            parameters=parameters,
            wrap=replace(getattr(shuffler, name)),
            why="an explicit mask of padding, weights and shapes kept, indices that describe the order",
            until=until,
        )
        for name, parameters in rows
    ]
    return hooks + [
        Hook(
            target=f"{_TASKS}:{task}.get_workloads",
            bound_in=(f"{_TASKS}:{task}",),
            parameters=("self", "seqlen", "num_heads", "head_dim"),
            wrap=replace(flops_of(model)),
            why="int32 lengths wrap, and attention is counted once a head too often",
            until=until,
        )
        for task, model in (("HSTUAttentionTask", "hstu"), ("SelfAttentionTask", "sid_gr"))
    ]


def _find_factory() -> Any:
    try:
        module = importlib.import_module(_FACTORY)
    except ModuleNotFoundError as error:
        raise BalanceError(
            f"cannot import {_FACTORY} ({error}): PYTHONPATH must name the examples folder of recsys-examples."
        ) from error
    factory = getattr(module, "BatchShufflerFactory", None)
    missing = [
        name for name in ("register", "unregister", "is_registered", "list_available") if not hasattr(factory, name)
    ]
    if missing:
        raise BalanceError(
            f"{_FACTORY}.BatchShufflerFactory of {_version()} has no {', '.join(missing)}: use a supported version."
        )
    return factory


def _version() -> str:
    """The folder of recsys-examples, which has no version, and the version of torchrec."""
    commons = importlib.import_module(_FACTORY)
    folder = Path(commons.__file__ or "").parents[2]
    return f"recsys-examples in {folder} (torchrec {metadata.version('torchrec')})"
