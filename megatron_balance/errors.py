"""The error class that users meet, and the check of sizes that all classes and functions share."""

from __future__ import annotations

import operator
from typing import SupportsIndex, cast


class BalanceError(ValueError):
    """A flag, a file or a Megatron version that cannot be used.

    The message names the flag (or file, or hook target), the value seen and what would be right.
    It is raised before training starts and on every rank: the inputs it concerns are the same
    everywhere.
    """


class RefusedError(BalanceError):
    """Flags that do not go together, found while they are parsed: the launchers print the message alone."""


def check_integer(name: str, value: object, *, minimum: int = 1) -> int:
    """The value as an int, be it numpy's; raises BalanceError where it is a boolean, no integer or too small."""
    try:
        number = None if isinstance(value, bool) else operator.index(cast("SupportsIndex", value))
    except TypeError:
        number = None
    if number is None or number < minimum:
        raise BalanceError(f"{name} is {value!r}: it must be an integer of at least {minimum}.")
    return number
