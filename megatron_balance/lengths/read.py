"""Reads sample lengths from a file.

A length is the number of tokens of one sample. Files keep their order: it is the order in which the samples would be
trained on. Every reader returns raw values with the place each came from; one check then turns them into int64, so that
a wrong value is named by file, line and value in every format.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError

MAX_LENGTH = 2**31 - 1
"""Longest sample, tokens: cu_seqlens are int32."""

MAX_ARCHIVE_NBYTES = 2**31
"""Limit on all arrays of one archive, unpacked: a small file can unpack to more than a machine holds."""

DEFAULT_KEYS = ("length", "num_tokens")
"""Names under which a length is looked for when no key is given."""

_RawLengths = tuple[NDArray[Any] | Sequence[object], Callable[[int], str]]
"""Values as read, and the place of the i-th."""


def read_lengths(path: str | Path, *, key: str | None = None) -> NDArray[np.int64]:
    """Read sample lengths, in file order.

    Args:
        path: an `.npy` array; an `.npz` archive; `.jsonl` with a number or an object a line; `.csv` with or
            without a header; `.txt` with one number a line; `.parquet` (needs pyarrow); the `.idx` of a Megatron data
            set, of which a sample is a document.
        key: array, column or JSON field that holds the lengths. Without it `length` or `num_tokens` is
            taken, or the only array or column there is.

    Returns:
        `[num_samples]` int64, tokens.

    Raises:
        BalanceError: the file is missing, empty or of an unknown kind; columns are several and none is
            named; a length is negative, fractional, NaN or above `MAX_LENGTH`.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in _READERS:
        raise BalanceError(f"{file}: unknown suffix {file.suffix!r}; use one of {', '.join(_READERS)}.")
    if key is not None and suffix in (".npy", ".txt", ".idx"):
        raise BalanceError(f"{file} holds lengths without names: leave out --key {key}.")
    reader, what = _READERS[suffix]
    try:
        return _checked(file, *reader(file, key))
    except BalanceError:  # a ValueError that says enough
        raise
    except OSError as error:
        reason = error.strerror or error
        raise BalanceError(f"{file} cannot be read: {reason}; give a file of lengths, or synthetic:NAME.") from error
    except (ValueError, EOFError, MemoryError, RuntimeError, csv.Error, zipfile.BadZipFile, zlib.error) as error:
        raise BalanceError(f"{file} is not {what}: {error}") from error


def _checked(file: Path, raw: NDArray[Any] | Sequence[object], place: Callable[[int], str]) -> NDArray[np.int64]:
    """Raw values as int64 `[num_samples]`; raises at the first value that is no length."""
    if len(raw) == 0:
        raise BalanceError(f"{file} holds no lengths; it needs at least one sample.")
    values = raw if isinstance(raw, np.ndarray) else np.array([_number(value) for value in raw])
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise BalanceError(
            f"{file} holds {values.dtype} values of shape {list(values.shape)}; lengths are integers, [num_samples]."
        )
    # Written so that NaN fails it as well.
    wrong = ~((values >= 0) & (values <= MAX_LENGTH) & (values == np.floor(values)))
    if wrong.any():
        index = int(np.argmax(wrong))
        raise BalanceError(
            f"{file}, {place(index)} is {raw[index]}: a length is a whole number of tokens, from 0 to {MAX_LENGTH}. "
            "Correct it or leave the sample out."
        )
    return values.astype(np.int64)


def _number(value: object) -> float:
    """A value of a text file; NaN where it is no number."""
    try:
        return math.nan if isinstance(value, bool) else float(cast("Any", value))
    except (OverflowError, TypeError, ValueError):
        return math.nan


def _choose(names: Sequence[str], *, where: str, key: str | None, what: str) -> str:
    """The name that holds the lengths among those of an archive, a table or a record."""
    listed = ", ".join(names) or "none"
    if key is not None and key not in names:
        raise BalanceError(f"{where} has no {what} {key!r} (--key); it has {listed}.")
    wanted = DEFAULT_KEYS if key is None else (key,)
    found = [name for name in wanted if name in names] or (list(names) if len(names) == 1 and what != "field" else [])
    if not found:
        missing = " or ".join(map(repr, DEFAULT_KEYS))
        raise BalanceError(
            f"{where} has no {what} {missing}, but {len(names)} {what}s: {listed}; name the lengths with --key."
        )
    return found[0]


def _read_npy(file: Path, _: str | None) -> _RawLengths:
    # Mapped, a file takes no memory for what its header claims, and pickled objects, which can run code, are refused.
    return np.atleast_1d(np.array(np.lib.format.open_memmap(file, mode="r"))), "index {}".format


def _read_npz(file: Path, key: str | None) -> _RawLengths:
    with zipfile.ZipFile(file) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
    if unpacked > MAX_ARCHIVE_NBYTES:
        raise BalanceError(f"{file} unpacks to {unpacked} bytes, and at most {MAX_ARCHIVE_NBYTES} are read.")
    with np.load(file, allow_pickle=False) as arrays:
        name = _choose(list(arrays), where=str(file), key=key, what="array")
        return np.atleast_1d(arrays[name]), lambda index: f"array {name!r}, index {index}"


def _read_jsonl(file: Path, key: str | None) -> _RawLengths:
    numbered: list[tuple[int, object]] = []
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                value: object = json.loads(line)
            except ValueError as error:
                raise BalanceError(f"{file}, line {number} is not JSON: {error}. Write one value a line.") from error
            if isinstance(value, dict):
                fields = cast("dict[str, object]", value)
                value = fields[_choose(list(fields), where=f"{file}, line {number}", key=key, what="field")]
            numbered.append((number, value))
    return [value for _, value in numbered], lambda index: f"line {numbered[index][0]}"


def _read_csv(file: Path, key: str | None) -> _RawLengths:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines)
        numbered = [(rows.line_num, row) for row in rows if any(cell.strip() for cell in row)]
    first = [cell.strip() for cell in numbered[0][1]] if numbered else []
    column = 0
    # A header is a first row that holds a name: "12" and "-3.5" and "nan" are values, if not lengths.
    if any(math.isnan(_number(cell)) and cell.lower() != "nan" for cell in first):
        column = first.index(_choose(first, where=str(file), key=key, what="column"))
        numbered = numbered[1:]
    elif key is not None or len(first) > 1:
        raise BalanceError(f"{file} has {len(first)} columns and no header line; add one that names `length`.")
    cells = ["".join(row[column : column + 1]).strip() or "missing" for _, row in numbered]
    return cells, lambda index: f"line {numbered[index][0]}"


def _read_parquet(file: Path, key: str | None) -> _RawLengths:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise BalanceError(f"{file}: reading parquet needs pyarrow; pip install '.[report]' in a clone.") from error
    with parquet.ParquetFile(file) as table:
        name = _choose(list(table.schema_arrow.names), where=str(file), key=key, what="column")
        return table.read(columns=[name]).column(name).to_numpy(), lambda row: f"column {name!r}, row {row}"


_IDX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the tokens' type, number of sequences, number of document bounds."""


def _read_idx(file: Path, _: str | None) -> _RawLengths:
    """Tokens of each document, from the index of `megatron.core.datasets.indexed_dataset`.

    After the header: int32 tokens of every sequence, int64 places of them in the `.bin`, and int64 bounds of documents,
    in sequences.
    """
    content = file.read_bytes()
    if len(content) < _IDX_HEADER.size or not content.startswith(b"MMIDIDX\0\0"):
        raise BalanceError(f"{file} is not the index of a Megatron data set: it does not begin with MMIDIDX.")
    _, version, _, num_sequences, num_bounds = _IDX_HEADER.unpack_from(content)
    at_bounds = _IDX_HEADER.size + 12 * num_sequences
    if version != 1 or at_bounds + 8 * num_bounds > len(content):
        raise BalanceError(f"{file} is cut off, or of version {version}: version 1 of Megatron's index is read.")
    tokens = np.frombuffer(content, dtype="<i4", count=num_sequences, offset=_IDX_HEADER.size)
    bounds = np.frombuffer(content, dtype="<i8", count=num_bounds, offset=at_bounds)
    if not num_bounds or bounds[0] != 0 or bounds[-1] != num_sequences or (np.diff(bounds) < 0).any():
        raise BalanceError(f"{file} is damaged: its bounds of documents are not those of its sequences.")
    until = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    return np.diff(until[bounds]), "document {}".format


_READERS: dict[str, tuple[Callable[[Path, str | None], _RawLengths], str]] = {
    ".npy": (_read_npy, "an .npy array of integers, as numpy writes it"),
    ".npz": (_read_npz, "an .npz archive of integers, as numpy writes it"),
    ".jsonl": (_read_jsonl, "UTF-8 text"),
    ".csv": (_read_csv, "UTF-8 text of comma-separated values"),
    ".txt": (_read_csv, "UTF-8 text of a number a line"),
    ".parquet": (_read_parquet, "a parquet file"),
    ".idx": (_read_idx, "an index"),
}
"""By suffix the reader, and what it reads."""
