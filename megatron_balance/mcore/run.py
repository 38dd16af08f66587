"""Builds the balanced run of a process once all ranks agree on it, and keeps it for the hooks.

`build_run` builds it, `current` is where hooks find it.

Invariants: ranks agree before any makes a process group, those of stock runs too; an error in the flags or files of one
rank is raised on every rank of the world; every rank makes all groups in the same order.
"""

from __future__ import annotations

import contextlib
import functools
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.hooking import Function, Hook, install_hooks
from megatron_balance.mcore.setup.flags import refuse
from megatron_balance.mcore.setup.layout import Layout, refuse_bound_device
from megatron_balance.mcore.setup.rules import Options, nothing_balances
from megatron_balance.mcore.setup.settings import Settings, settings_of, timeout_of
from megatron_balance.mcore.step import BalancedForwardBackward
from megatron_balance.model.shape import ModelShape
from megatron_balance.runtime.log import log_info, start_log
from megatron_balance.runtime.process import allow_open_files, close_all, version_of
from megatron_balance.version import build_version

PACKAGES = ("megatron-core", "torch", "numpy")
"""Packages whose other versions might plan or compute differently."""

FLAG_PREFIXES = ("balance", "use_dynamic_batch_size", "max_tokens_per_gpu")
"""Beginnings of the names of balance flags."""

FILES = ("balance_record", "balance_cost")
"""Flags by which ranks may name files differently; costs are compared as a cost model."""

MEGATRON_SETTINGS = (
    *("train_iters", "global_batch_size", "rampup_batch_size", "micro_batch_size", "seq_length", "seed"),
    *("eval_global_batch_size", "eval_micro_batch_size", "full_validation", "multiple_validation_sets", "sft"),
    *("dataloader_type", "log_interval", "iteration", "consumed_train_samples"),
)
"""Megatron's options that decide when ranks of this package meet, and on which samples."""

_built: tuple[Any, BalancedForwardBackward | None] | None = None
"""What the run was built for and the run; kept, since evaluation asks for a schedule repeatedly."""

_hooks: dict[str, contextlib.ExitStack] = {}
"""Of `megatron.core`, in place for runs of this process, by target."""


def current() -> BalancedForwardBackward | None:
    """The balanced run, once its first step has begun; None in a stock run."""
    return None if _built is None else _built[1]


def run_of(owner: Any, build: Callable[[], BalancedForwardBackward | None]) -> BalancedForwardBackward | None:
    """The balanced run of a training, built on its first call; every rank of the world calls it."""
    global _built
    if _built is None or _built[0] is not owner:
        _built = owner, build()
    return _built[1]


def while_balancing(
    replacement: Function, *, run: Callable[[], BalancedForwardBackward | None] = current
) -> Callable[[Function], Function]:
    """A wrapper that takes effect in a balanced run, which `run` may build: `replacement(run, function, …)`."""

    def wrap(function: Function) -> Function:
        @functools.wraps(function)
        def wrapper(*positional: Any, **keywords: Any) -> Any:
            balanced = run()
            if balanced is None:
                return function(*positional, **keywords)
            return replacement(balanced, function, *positional, **keywords)

        return wrapper

    return wrap


def in_step(replacement: Function) -> Callable[[Function], Function]:
    """A wrapper that takes effect while a balanced step runs: `replacement(step, function, …)`."""

    def call_in_step(run: BalancedForwardBackward, function: Function, *positional: Any, **keywords: Any) -> Any:
        if run.running is None:
            return function(*positional, **keywords)
        return replacement(run.running, function, *positional, **keywords)

    return while_balancing(call_in_step)


def end_run() -> None:
    """Remove the hooks that the run needed, forget it, and end its threads, processes and groups."""
    global _built
    while _hooks:
        _hooks.popitem()[1].close()
    _built = None
    close_all()


def build_run(
    options: Options,
    *,
    shape: Callable[[], ModelShape],
    hooks: Callable[[Options], Sequence[Hook]],
    cost: CostModel | None = None,
    args: Namespace | None = None,
    num_steps_done: Callable[[], int] | None = None,
) -> BalancedForwardBackward | None:
    """The balanced run of any loop, or None where it stays stock; every rank of the world calls it.

    Options, `shape` and `cost` are as for `settings_of`, `args` and `num_steps_done` as for `BalancedForwardBackward`;
    `hooks` are those that a run with some options needs. A BalanceError is raised on every rank.
    """
    settings: Settings | None = None
    problem = None
    try:
        refuse(options)
        if not nothing_balances(options):
            refuse_bound_device()
            settings = settings_of(options, shape=shape, cost=cost)
            allow_open_files(settings.topology.num_sockets)
            version = f"megatron-core {version_of('megatron-core')}"
            for hook in hooks(options):
                if hook.target not in _hooks:
                    _hooks[hook.target] = install_hooks([hook], version=version)
    except BalanceError as error:
        problem = str(error)
    # A stock run sends only that it is stock.
    announcement = {"balancing": "off (no balance flag)"}
    if settings is not None:
        announcement = _announcement(settings, options=options)
    layout = Layout.from_parallel_state(announcement, timeout=timeout_of(options), error=problem)
    if settings is None:
        return None
    start_log()
    for line in settings.log_lines:
        log_info(line)
    return BalancedForwardBackward(settings, layout=layout, args=args, num_steps_done=num_steps_done)


def _announcement(settings: Settings, *, options: Options) -> dict[str, str]:
    """Everything that must be equal on all ranks, by name."""
    flags = {name: value for name, value in options.items() if name.startswith(FLAG_PREFIXES) and name not in FILES}
    return {
        "balancing": "on",
        "version of megatron_balance": build_version(),
        **{f"version of {name}": str(version_of(name)) for name in PACKAGES},
        **{name: str(value) for name, value in flags.items()},
        **{name: str(options.get(name)) for name in MEGATRON_SETTINGS},
        "balanced evaluation": str(settings.eval_limits is not None),
        "topology": str(settings.topology),
        "cost model": str(settings.costs.model),
    }
