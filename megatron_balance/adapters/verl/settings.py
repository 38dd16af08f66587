"""What the installed adapter was asked for, for all hooks of this process.

verl binds functions by value: a trainer that is imported between `install()` and `undo()` keeps a hook that no one
can take out of it. So every hook asks here on each call, and hands on to verl's own function where there are no
settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from megatron_balance.cost.model import CostModel

Function = Callable[..., Any]


@dataclass(frozen=True)
class Settings:
    """The arguments of `install()`.

    Attributes:
        cost_model: what a row of some tokens costs.
        keep_minibatch: rows stay in the mini-batch that they are in, whatever verl's caller says.
        dispatch: whether worker-group calls are balanced: all, none, or those of these methods.
    """

    cost_model: CostModel
    _: KW_ONLY
    keep_minibatch: bool
    dispatch: bool | tuple[str, ...]

    def dispatches(self, method_name: str) -> bool:
        """Whether calls of this worker-group method are balanced."""
        return self.dispatch if isinstance(self.dispatch, bool) else method_name in self.dispatch


_active: Settings | None = None


def active() -> Settings | None:
    """The settings of this process; None where the adapter is not installed."""
    return _active


def activate(settings: Settings | None) -> None:
    """Make these the settings of this process; None hands every hook on to verl."""
    global _active
    _active = settings


def while_active(stock: Function, balanced: Callable[..., Any]) -> Function:
    """A function that hands on to verl's own while there are no settings.

    Args:
        stock: verl's function.
        balanced: takes the settings, then verl's arguments.
    """

    @functools.wraps(stock)
    def hook(*positional: Any, **keywords: Any) -> Any:
        settings = active()
        if settings is None:
            return stock(*positional, **keywords)
        return balanced(settings, *positional, **keywords)

    vars(hook)["is_hook"] = True
    return hook


def is_hook(function: Any) -> bool:
    """Whether a function is one that `while_active` made."""
    return getattr(function, "is_hook", False) is True
