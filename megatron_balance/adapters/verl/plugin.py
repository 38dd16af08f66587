"""Installs the adapter where `MEGATRON_BALANCE_VERL` asks for it; verl loads this plug-in in every process.

    MEGATRON_BALANCE_VERL=1                                       verl's own workload formula
    MEGATRON_BALANCE_VERL="model=/models/Qwen3-8B"                FLOPs of that model
    MEGATRON_BALANCE_VERL="cost=tokens dispatch=compute_log_prob,compute_values"

Without the variable, or with 0, it does nothing. verl swallows exceptions of a plug-in, and a rank without its hooks
would hang the others. So an error here ends the process with its message.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron_balance.adapters.verl import VARIABLE, read_options
from megatron_balance.errors import BalanceError


def install_from(environ: Mapping[str, str]) -> None:
    """Install with the settings of the environment, if it has any.

    Raises:
        SystemExit: the settings are wrong, or verl cannot be hooked.
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
