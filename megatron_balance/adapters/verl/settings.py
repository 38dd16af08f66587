"""The settings of the installed adapter, read from `install()`'s arguments or from the environment.

verl binds functions by value: a trainer imported between `install()` and `undo()` keeps its hook. So every hook reads
the settings on each call, and calls verl's own function where there are none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.hooking.installation import Installation
from megatron_balance.hooking.patches import Function
from megatron_balance.model.vision import VisionEncoder

VARIABLE = "MEGATRON_BALANCE_VERL"
"""The environment variable that the plug-in reads."""

_SWITCH = {"yes": True, "no": False}


@dataclass(frozen=True)
class Settings:
    """The arguments of `install()`.

    Attributes:
        cost_model: cost of a row from its tokens and images.
        keep_minibatch: rows stay in their mini-batch, whatever verl's caller asks for.
        dispatch: balance all worker-group calls, none, or those of these methods.
        encoder: runs the images of a row (`multi_modal_inputs`); None where images cost nothing.
    """

    cost_model: CostModel
    _: KW_ONLY
    keep_minibatch: bool
    dispatch: bool | tuple[str, ...]
    encoder: VisionEncoder | None = None

    def dispatches(self, method_name: str) -> bool:
        """True if calls of this worker-group method are balanced."""
        return self.dispatch if isinstance(self.dispatch, bool) else method_name in self.dispatch


installation: Installation[Settings] = Installation("verl")


def read_options(text: str) -> dict[str, Any]:
    """Parses the value of `MEGATRON_BALANCE_VERL` into arguments of `install()`.

    Args:
        text: `key=value` pairs with spaces between them, or `1` for the defaults.

    Raises:
        BalanceError: a key is unknown, or a value is not allowed for its key.

    Example:
        >>> read_options("model=Qwen3-8B dispatch=yes")
        {'model': 'Qwen3-8B', 'dispatch': True}
    """
    options: dict[str, Any] = {}
    for word in text.split() if text.strip() != "1" else ():
        key, _, value = word.partition("=")
        if key in ("model", "cost") and value:
            options[key] = value
        elif key == "keep_minibatch" and value in _SWITCH:
            options[key] = _SWITCH[value]
        elif key == "dispatch" and value:
            options[key] = _SWITCH[value] if value in _SWITCH else tuple(value.split(","))
        else:
            raise BalanceError(
                f"{VARIABLE} has {word!r}: it must be 1, or some of model=…, cost=flops|tokens|FILE, "
                "keep_minibatch=yes|no, dispatch=yes|no|METHOD,METHOD."
            )
    return options


def while_active(stock: Function, balanced: Callable[..., Any]) -> Function:
    """Wraps verl's function: while the adapter is installed `balanced` runs in its place.

    Args:
        stock: verl's function.
        balanced: takes the settings, then verl's arguments.
    """

    @functools.wraps(stock)
    def hook(*positional: Any, **keywords: Any) -> Any:
        settings = installation.settings
        if settings is None:
            return stock(*positional, **keywords)
        return balanced(settings, *positional, **keywords)

    vars(hook)["is_hook"] = True
    return hook


def is_hook(function: Any) -> bool:
    """True if a function is one of this adapter's hooks."""
    return getattr(function, "is_hook", False) is True
