"""Reads the records of a data file and finds their fields by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_balance.errors import BalanceError
from megatron_balance.files.untrusted import parse_json

MOST_SHOWN = 80
"""Characters of a wrong name or value in a message."""

_MOST_NAMES = 12
"""Names in a message."""


def json_lines(file: Path, *, holds: str) -> Iterator[tuple[int, object, int]]:
    """The values of a `.jsonl` file.

    Args:
        file: one JSON value a line; blank lines are left out.
        holds: expected content of a line, for messages: `a value`, `an object`.

    Yields:
        Line number from 1, the value, and the bytes read so far.

    Raises:
        BalanceError: a line is not JSON.
    """
    done = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            done += len(line)
            if not (text := line.decode("utf-8-sig").strip()):
                continue
            try:
                value: object = parse_json(text)
            except ValueError as error:
                raise BalanceError(f"{file}, line {number} is not JSON: {error}. Write one {holds} a line.") from error
            yield number, value, done


def choose_field(names: Sequence[str], *, wanted: Sequence[str], where: str, remedy: str) -> str:
    """The first wanted name that a record or a table has.

    Args:
        names: fields or columns that there are.
        wanted: in the order of preference.
        where: the record or the file, for the message.
        remedy: last sentence of the message.

    Raises:
        BalanceError: it has none of them.
    """
    for name in wanted:
        if name in names:
            return name
    raise BalanceError(f"{where} has no field {' or '.join(map(repr, wanted))}; it has {listed(names)}. {remedy}")


def listed(names: Sequence[str]) -> str:
    """Names for a message, which is short however many and long they are."""
    shown = ", ".join(name if len(name) <= MOST_SHOWN else f"{name[:MOST_SHOWN]}…" for name in names[:_MOST_NAMES])
    return (shown or "none") + (f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else "")
