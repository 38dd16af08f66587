"""Reads sample lengths from a file.

A length is the number of tokens of one sample. Files keep their order: it is the order in which the
samples would be trained on. Every reader returns raw values with the place each came from; one check
then turns them into int64, so that a wrong value is named by file, line and value in every format.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.files.untrusted import opened_archive, readable_arrays
from megatron_balance.lengths.parquet import open_parquet
from megatron_balance.lengths.records import MOST_SHOWN, choose_field, json_lines, listed
from megatron_balance.lengths.synthetic import SYNTHETIC_LENGTHS, synthetic_lengths

__all__ = ["MAX_LENGTH", "SYNTHETIC_LENGTHS", "read_lengths", "synthetic_lengths"]

MAX_LENGTH = 2**31 - 1
"""Longest sample, tokens: cu_seqlens are int32."""

DEFAULT_KEYS = ("length", "num_tokens")
"""Names under which a length is looked for when no key is given."""


@dataclass(frozen=True)
class _RawLengths:
    """Values as read, and the place of the i-th one for messages."""

    values: NDArray[Any] | list[object]
    place: Callable[[int], str]


def read_lengths(path: str | Path, *, key: str | None = None) -> NDArray[np.int64]:
    """Read sample lengths, in file order.

    Args:
        path: an `.npy` array; an `.npz` archive; `.jsonl` with a number or an object a line; `.csv` with or
            without a header; `.txt` with one number a line; `.parquet` (needs pyarrow).
        key: array, column or JSON field that holds the lengths. Without it `length` or `num_tokens` is
            taken, or the only array or column there is.

    Returns:
        `[num_samples]` int64, tokens.

    Raises:
        BalanceError: the file is missing, empty or of an unknown kind; columns are several and none is
            named; a length is negative, fractional, NaN or above `MAX_LENGTH`.
    """
    file = Path(path)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise BalanceError(f"{file}: unknown suffix {file.suffix!r}; use one of {', '.join(_READERS)}.")
    if not file.is_file():
        reason = "is not a file" if file.exists() else "does not exist"
        raise BalanceError(f"{file} {reason}; give a file of lengths, or synthetic:NAME.")
    try:
        raw = reader(file, key)
    except UnicodeDecodeError as error:
        raise BalanceError(f"{file} is not UTF-8 text (byte {error.start}); save it as UTF-8.") from error
    except csv.Error as error:
        raise BalanceError(f"{file} is not a table of comma-separated values: {error}.") from error
    except OSError as error:
        raise BalanceError(f"{file} cannot be read: {error.strerror or error}.") from error
    return _checked(file, raw)


def _checked(file: Path, raw: _RawLengths) -> NDArray[np.int64]:
    """Raw values as int64 `[num_samples]`; raises at the first value that is no length."""
    if len(raw.values) == 0:
        raise BalanceError(f"{file} holds no lengths; it needs at least one sample.")
    if isinstance(raw.values, list):
        numbers = [_whole_number(value) for value in raw.values]
        for index, number in enumerate(numbers):
            if not isinstance(number, int):
                raise _wrong_length(file, raw, index, number)
        return np.array(numbers, dtype=np.int64)

    values = raw.values
    if values.ndim != 1:
        raise BalanceError(f"{file} has shape {list(values.shape)}; lengths are one number a sample, [num_samples].")
    if values.dtype.kind not in "iuf":
        raise BalanceError(f"{file} holds {values.dtype} values; lengths are integers.")
    with np.errstate(invalid="ignore"):
        # Written so that NaN fails it as well.
        wrong = ~((values >= 0) & (values <= MAX_LENGTH) & (values == np.floor(values)))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise _wrong_length(file, raw, index, str(_whole_number(values[index].item())))
    return values.astype(np.int64)


def _whole_number(value: object) -> int | str:
    """A length as int, or the reason why `value` is not one."""
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            try:
                value = float(value)
            except ValueError:
                return "is not a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "is not a number"
    if isinstance(value, float):
        if math.isnan(value):
            return "is NaN"
        if not value.is_integer():
            return "is not an integer"
    if value < 0:
        return "is negative"
    if value > MAX_LENGTH:
        return f"is above {MAX_LENGTH}"
    return int(value)


def _wrong_length(file: Path, raw: _RawLengths, index: int, reason: str) -> BalanceError:
    value = str(raw.values[index])
    shown = value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}…"
    return BalanceError(
        f"{file}, {raw.place(index)}: {shown} {reason}; a length is the number of tokens of a sample, a whole "
        f"number of 0 or more. Correct the line or leave the sample out."
    )


def _at_index(index: int) -> str:
    return f"index {index}"


def _choose(file: Path, names: list[str], *, key: str | None, what: str) -> str:
    """The name that holds the lengths among `names`."""
    if key is not None:
        if key in names:
            return key
        raise BalanceError(f"{file} has no {what} {key!r} (--key); it has {listed(names)}.")
    for name in DEFAULT_KEYS:
        if name in names:
            return name
    if len(names) == 1:
        return names[0]
    if not names:
        raise BalanceError(f"{file} holds no {what}; it needs at least one sample.")
    raise BalanceError(f"{file} has {len(names)} {what}s: {listed(names)}; name the lengths with --key.")


def _read_npy(file: Path, key: str | None) -> _RawLengths:
    if key is not None:
        raise BalanceError(f"{file} holds one array without a name: leave out --key {key}.")
    try:
        # Pickled objects can run code: lengths never need them.
        with readable_arrays():
            values = np.load(file, allow_pickle=False)
    except ValueError as error:
        raise BalanceError(f"{file} is not an .npy array of integers: {error}") from error
    if not isinstance(values, np.ndarray):
        raise BalanceError(f"{file} is an archive of arrays; name it .npz.")
    return _RawLengths(values=np.atleast_1d(cast("NDArray[Any]", values)), place=_at_index)


def _read_npz(file: Path, key: str | None) -> _RawLengths:
    try:
        with opened_archive(file) as archive:
            name = _choose(file, list(archive), key=key, what="array")
            values = np.atleast_1d(archive[name])
    except BalanceError:
        raise
    except ValueError as error:
        raise BalanceError(f"{file} is not an .npz archive of integers, write it with numpy.savez: {error}") from error
    return _RawLengths(values=values, place=lambda index: f"array {name!r}, index {index}")


def _text_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Line numbers from 1 and stripped lines; blank ones are left out."""
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if stripped := line.strip():
                yield number, stripped


def _at_lines(numbers: list[int]) -> Callable[[int], str]:
    return lambda index: f"line {numbers[index]}"


def _read_txt(file: Path, key: str | None) -> _RawLengths:
    if key is not None:
        raise BalanceError(f"{file} holds one number a line, without names: leave out --key {key}.")
    numbered = list(_text_lines(file))
    return _RawLengths(values=[text for _, text in numbered], place=_at_lines([number for number, _ in numbered]))


def _read_jsonl(file: Path, key: str | None) -> _RawLengths:
    values: list[object] = []
    numbers: list[int] = []
    for number, value, _ in json_lines(file, holds="value"):
        if isinstance(value, dict):
            fields = cast("dict[str, object]", value)
            value = fields[
                choose_field(
                    list(fields),
                    wanted=DEFAULT_KEYS if key is None else (key,),
                    where=f"{file}, line {number}",
                    remedy="Name the length's field with --key.",
                )
            ]
        values.append(value)
        numbers.append(number)
    return _RawLengths(values=values, place=_at_lines(numbers))


def _read_csv(file: Path, key: str | None) -> _RawLengths:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines)
        numbered = [(rows.line_num, row) for row in rows if any(cell.strip() for cell in row)]
    if not numbered:
        return _RawLengths(values=[], place=_at_index)
    first = [cell.strip() for cell in numbered[0][1]]
    # A header is a first row that holds a name: "12" and "-3.5" and "nan" are values, if not lengths.
    if any(_whole_number(cell) == "is not a number" for cell in first):
        column = first.index(_choose(file, first, key=key, what="column"))
        numbered = numbered[1:]
    elif key is not None:
        raise BalanceError(f"{file} has no header line, so no column {key!r}: leave out --key, or add a header.")
    elif len(first) > 1:
        raise BalanceError(f"{file} has {len(first)} columns and no header line; add one that names `length`.")
    else:
        column = 0
    for number, row in numbered:
        if column >= len(row):
            raise BalanceError(f"{file}, line {number} has {len(row)} columns; the length is column {column + 1}.")
    return _RawLengths(
        values=[row[column].strip() for _, row in numbered], place=_at_lines([number for number, _ in numbered])
    )


def _read_parquet(file: Path, key: str | None) -> _RawLengths:
    with open_parquet(file, extra="report") as table:
        name = _choose(file, list(table.schema_arrow.names), key=key, what="column")
        values = cast("NDArray[Any]", table.read(columns=[name]).column(name).to_numpy())
    return _RawLengths(values=values, place=lambda index: f"column {name!r}, row {index}")


_READERS: dict[str, Callable[[Path, str | None], _RawLengths]] = {
    ".npy": _read_npy,
    ".npz": _read_npz,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".txt": _read_txt,
    ".parquet": _read_parquet,
}
