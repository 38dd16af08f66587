"""What verl loads as a plug-in, in every process: installs the adapter where `MEGATRON_BALANCE_VERL` says so.

    MEGATRON_BALANCE_VERL=1                                       verl's own workload formula
    MEGATRON_BALANCE_VERL="model=/models/Qwen3-8B"                FLOPs of that model
    MEGATRON_BALANCE_VERL="cost=tokens keep_minibatch=no dispatch=compute_log_prob,compute_values"

Without the variable it does nothing. verl swallows what a plug-in raises, and a rank that goes on without its hooks
would hang the others; so an error here ends the process, with its message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megatron_balance.errors import BalanceError

VARIABLE = "MEGATRON_BALANCE_VERL"

_SWITCH = {"yes": True, "no": False}


def read_options(text: str) -> dict[str, Any]:
    """Arguments of `install()` from `key=value` pairs with spaces between them; `1` alone for none.

    Raises:
        BalanceError: a word is no option, or its value is none of its values.

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


def install_from(environ: Mapping[str, str]) -> None:
    """Install as the environment says; nothing where it says nothing.

    Raises:
        SystemExit: it cannot be installed as it says.
    """
    text = environ.get(VARIABLE, "")
    if not text.strip() or text.strip() == "0":
        return
    from megatron_balance.adapters.verl import install

    try:
        install(**read_options(text))
    except BalanceError as error:
        raise SystemExit(f"{VARIABLE}={text!r}: {error}") from error


install_from(os.environ)
