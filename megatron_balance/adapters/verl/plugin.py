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


_text = os.environ.get(VARIABLE, "").strip()
if _text not in ("", "0"):
    _words = [word.partition("=") for word in _text.split() if word != "1"]
    try:
        install(**{key: value for key, _, value in _words})
    except (BalanceError, TypeError) as error:
        raise SystemExit(f"{VARIABLE}={_text!r}: {error}") from error
