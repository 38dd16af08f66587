"""Fills in the balance flags that `--balance` leaves open, right after parsing.

Invariants: a flag that was given keeps its value; what is filled in follows from the command line and the installed
releases alone, so that all ranks choose the same.
"""

from __future__ import annotations

import copy
from typing import Any

from megatron_balance.mcore.options import cautions, problems
from megatron_balance.mcore.setup.arguments import ALL_RANKS

OFF = "off"
"""`--balance-context-parallel off`: the run's own size in every micro-batch, also under `--balance`."""


def fill_in_flags(args: Any) -> None:
    """Set what `--balance` leaves open, and note in `args.balance_choices` each choice and its reason.

    Args:
        args: Megatron's namespace with the balance flags, just parsed.
    """
    args.balance_choices = []
    sizes_are_open = args.balance_context_parallel is None
    if args.balance_context_parallel == OFF:
        args.balance_context_parallel = None
    if not args.balance:
        return
    _choose(args, "use_dynamic_batch_size", True, "samples share micro-batches, and padding is not computed")
    _choose(args, "balance_data", True, "samples move to ranks that would wait")
    if args.use_dynamic_batch_size:
        _choose_cap(args)
        _choose(args, "balance_by_flops", True, "attention grows with the square of a sample's length")
    if args.use_dynamic_batch_size and args.balance_data and sizes_are_open:
        _choose_context_parallel(args)


def _choose(args: Any, name: str, value: object, reason: str) -> None:
    if getattr(args, name) is None:
        setattr(args, name, value)
        flag = f"--{name.replace('_', '-')}"
        args.balance_choices.append(f"{flag if value is True else f'{flag} {value}'} ({reason})")


def _choose_cap(args: Any) -> None:
    """The tokens of a stock micro-batch, of which it is known that they fit; none where lengths come later."""
    rows, tokens = getattr(args, "micro_batch_size", None) or 1, getattr(args, "seq_length", None)
    if tokens:
        cp_size = getattr(args, "context_parallel_size", None) or 1
        cap = -(-rows * tokens // cp_size)
        reason = f"as a stock micro-batch: --micro-batch-size {rows} times --seq-length {tokens}"
        reason += f" over {cp_size} context-parallel ranks" if cp_size > 1 else ""
        _choose(args, "max_tokens_per_gpu", cap, reason)


def _choose_context_parallel(args: Any) -> None:
    trial = copy.copy(args)
    trial.balance_context_parallel = ALL_RANKS
    known = {*problems(args), *cautions(args)}
    # That no test runs Transformer Engine on several GPUs is said in the log, and is no reason against it.
    against = [message for message in (*problems(trial), *cautions(trial, untried=False)) if message not in known]
    if against:
        args.balance_choices.append(f"no --balance-context-parallel ({against[0].rstrip('.')})")
    else:
        _choose(args, "balance_context_parallel", ALL_RANKS, "many ranks share a long sample, short ones exchange less")
