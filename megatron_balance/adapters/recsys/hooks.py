"""What is hooked in recsys-examples, and the name that is registered.

Invariants: all of it is in place or none; `undo()` restores the very functions and takes the name out again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.hooking import patches as patching

NAME = "megatron_balance"
"""Under which the shuffler is registered in upstream's BatchShufflerFactory."""

_SHUFFLER = "commons.distributed.batch_shuffler:BaseTaskBalancedBatchShuffler"
_FACTORY = "commons.distributed.batch_shuffler_factory"
_TASKS = "commons.perf_model.task_estimator"

_installed: Installed | None = None


class Installed:
    """The adapter in place.

    Attributes:
        shuffler_class: what is registered.
    """

    def __init__(self, patches: patching.Patches, *, factory: Any, shuffler_class: type) -> None:
        self.shuffler_class = shuffler_class
        self._patches = patches
        self._factory = factory

    def undo(self) -> None:
        """Put upstream's own back. Shufflers that were made as "megatron_balance" go on as they are.

        Raises:
            BalanceError: someone else has wrapped one of the functions since; nothing is changed then.
        """
        global _installed
        self._patches.undo()
        if self._factory.is_registered(NAME):
            self._factory.unregister(NAME)
        if _installed is self:
            _installed = None


def is_installed() -> bool:
    """Whether the adapter is in place."""
    return _installed is not None


def install() -> Installed:
    """Put the adapter in place, once; a second call returns the first one's.

    Call it on every rank before a shuffler is made; a checkout's `examples` folder must be in the path, as it is when
    its trainings run.

    Raises:
        BalanceError: recsys-examples is not there, or not as expected; nothing is changed then.
    """
    global _installed
    if _installed is not None:
        return _installed
    factory = _find_factory()
    if factory.is_registered(NAME):
        raise BalanceError(f"a batch shuffler {NAME!r} is registered already, as {factory.list_available()[NAME]}.")
    # Here, since they need torchrec.
    from megatron_balance.adapters.recsys import shuffler

    patches = patching.install(_hooks(shuffler), version=_version())
    shuffler_class = shuffler.make_shuffler_class(
        importlib.import_module(_SHUFFLER.split(":")[0]).BaseTaskBalancedBatchShuffler
    )
    factory.register(NAME, shuffler_class)
    _installed = Installed(patches, factory=factory, shuffler_class=shuffler_class)
    return _installed


def _hooks(shuffler: Any) -> list[patching.Hook]:
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
        patching.Hook(
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
        patching.Hook(
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
    """recsys-examples has no version: where it lies, and the version of the library that it stands on."""
    commons = importlib.import_module(_FACTORY)
    folder = Path(commons.__file__ or "").parents[2]
    return f"recsys-examples in {folder} (torchrec {metadata.version('torchrec')})"
