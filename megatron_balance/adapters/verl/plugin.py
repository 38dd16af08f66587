"""Installs the adapter where `MEGATRON_BALANCE_VERL` asks for it; verl loads this plug-in in every process.

    MEGATRON_BALANCE_VERL=1                                       verl's own workload formula
    MEGATRON_BALANCE_VERL="model=/models/Qwen3-8B"                FLOPs of that model
    MEGATRON_BALANCE_VERL="cost=tokens"

Without the variable, or with 0, it does nothing. verl swallows exceptions of a plug-in, and a rank without its hooks
would hang the others. So an error here ends the process with its message.
"""

from __future__ import annotations

import os

from megatron_balance.adapters.verl import install
from megatron_balance.errors import BalanceError

VARIABLE = "MEGATRON_BALANCE_VERL"


def read_options(text: str) -> dict[str, str]:
    """The arguments of `install()`, from `key=value` pairs with spaces between them, or `1` for the defaults."""
    options: dict[str, str] = {}
    for word in text.split() if text.strip() != "1" else ():
        key, _, value = word.partition("=")
        if key not in ("model", "cost") or not value:
            raise BalanceError(f"{VARIABLE} has {word!r}: it must be 1, or some of model=…, cost=flops|tokens|FILE.")
        options[key] = value
    return options


_text = os.environ.get(VARIABLE, "").strip()
if _text not in ("", "0"):
    try:
        install(**read_options(_text))
    except BalanceError as error:
        raise SystemExit(f"{VARIABLE}={_text!r}: {error}") from error
