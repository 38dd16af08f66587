"""The error class that users meet, and the checks of sizes that all classes and functions share."""

from __future__ import annotations

import operator
from dataclasses import fields
from typing import Any, SupportsIndex, cast


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


def check_sizes(instance: Any) -> None:
    """Makes int of all sizes of a dataclass; refuses what is no integer or below 1, or 0 where that is the default."""
    for field in fields(instance):
        name, value = f"{type(instance).__name__}.{field.name}", getattr(instance, field.name)
        # Annotations are texts in all of these classes.
        if field.type == "int" or (field.type == "int | None" and value is not None):
            object.__setattr__(instance, field.name, check_integer(name, value, minimum=int(field.default != 0)))
        elif field.type == "bool" and not isinstance(value, bool):
            raise BalanceError(f"{name} is {value!r}: it must be True or False.")
