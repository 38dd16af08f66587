"""Reads sample lengths from a file, block by block, and no further than asked: a file may be larger than memory.

Every reader yields blocks of raw values, in the order of training, with the place that each came from; a check then
turns them into int64, so that a wrong value is named by file, line and value in every format.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.lengths.rows import MAX_LENGTHS, Rows

MAX_LENGTH = 2**31 - 1
"""Longest sample, tokens: cu_seqlens are int32."""

MAX_LINE = 2**26
"""Longest line of a text, bytes."""

DEFAULT_KEYS = ("length", "num_tokens", "input_ids")
"""Names under which a length is looked for when no key is given."""

_BLOCK = 2**16

Progress = Callable[[int], None]
"""Told how many rows are read."""


class _Block(NamedTuple):
    """Raw values of neighbouring rows, the place of the i-th row, and the number of values of each; None for 1."""

    values: NDArray[Any] | Sequence[object]
    place: Callable[[int], str]
    counts: Sequence[int] | None = None


def read_lengths(
    path: str | Path, *, key: str | None = None, limit: int | None = None, progress: Progress | None = None
) -> NDArray[np.int64]:
    """The lengths of `read_rows`: `[num_sequences]` int64, tokens."""
    return read_rows(path, key=key, limit=limit, progress=progress).lengths


def read_rows(
    path: str | Path, *, key: str | None = None, limit: int | None = None, progress: Progress | None = None
) -> Rows:
    """Read sample lengths, in file order.

    Args:
        path: an `.npy` array; an `.npz` archive; `.jsonl` with a line for each row: a number, an object, or a list of
            the lengths packed into it; `.txt` with one number a line; each of these but `.npz` also with `.gz`;
            `.parquet` (needs pyarrow); the `.idx` of a Megatron data set, or its path without suffix, whose sequences
            are the documents of GPTDataset; `-`, the lines of the standard input.
        key: array, column or JSON field that holds the lengths, or lists of tokens that are counted. Without it
            `length`, `num_tokens` or `input_ids` is taken, or the only array or column there is.
        limit: rows to read; None for all of them, at most `MAX_LENGTHS`.

    Raises:
        BalanceError: the file is missing, empty, too long or of an unknown kind; columns are several and none is
            named; a length is negative, fractional, NaN or above `MAX_LENGTH`.
    """
    file = Path(path)
    if not file.suffix and (index := file.with_name(f"{file.name}.idx")).is_file():
        file = index
    is_gzip = file.suffix.lower() == ".gz"
    suffix = ".jsonl" if str(file) == "-" else Path(file.stem if is_gzip else file.name).suffix.lower()
    if suffix not in _READERS or (is_gzip and suffix in _SEEKING):
        raise BalanceError(f"{file}: unknown suffix {file.suffix!r}; use one of {', '.join(_READERS)}.")
    if key is not None and suffix in (".npy", ".txt", ".idx"):
        raise BalanceError(f"{file} holds lengths without names: leave out --key {key}.")
    reader, description = _READERS[suffix]
    try:
        if str(file) == "-":
            return _collect(file, reader(file, sys.stdin.buffer, key), limit=limit, progress=progress)
        with gzip.open(file) if is_gzip else file.open("rb") as stream:
            return _collect(file, reader(file, cast("BinaryIO", stream), key), limit=limit, progress=progress)
    except BalanceError:  # a ValueError that says enough
        raise
    except (gzip.BadGzipFile, zipfile.BadZipFile, *_WRONG_CONTENT) as error:
        raise BalanceError(f"{file} is not {description}: {error}") from error
    except OSError as error:
        reason = error.strerror or error
        raise BalanceError(f"{file} cannot be read: {reason}; give a file of lengths, or synthetic:NAME.") from error


_WRONG_CONTENT = (ValueError, LookupError, EOFError, MemoryError, RuntimeError, SyntaxError, zlib.error, struct.error)


def _collect(file: Path, blocks: Iterator[_Block], *, limit: int | None, progress: Progress | None) -> Rows:
    """The checked values of all blocks up to `limit` rows."""
    parts: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.int64]] = []
    num_rows = 0
    for block in blocks:
        values = _checked(file, block)
        block_counts = np.ones(len(values), np.int64) if block.counts is None else np.array(block.counts, np.int64)
        counts.append(block_counts[: None if limit is None else limit - num_rows])
        parts.append(values[: counts[-1].sum()])
        num_rows += counts[-1].size
        if max(num_rows, parts[-1].size) > MAX_LENGTHS:
            raise BalanceError(f"{file} holds more than {MAX_LENGTHS} lengths: leave out --shuffle, or give a part.")
        if progress is not None:
            progress(num_rows)
        if num_rows == limit:
            break
    if not num_rows:
        raise BalanceError(f"{file} holds no lengths; it needs at least one sample.")
    return Rows(np.concatenate(parts), np.concatenate(counts))


def _checked(file: Path, block: _Block) -> NDArray[np.int64]:
    """Raw values as int64; a BalanceError names the first that is not a length."""
    raw = block.values
    if isinstance(raw, np.ndarray):
        values = raw
    elif set(map(type, raw)) <= {int}:
        values = np.array(raw, dtype=None if raw else np.int64)
    else:
        values = np.array([_number(value) for value in raw])
    if values.dtype.kind == "O":  # integers of more than 64 bits
        values = values.astype(np.float64)
    # Written so that NaN fails it as well.
    wrong = ~((values >= 0) & (values <= MAX_LENGTH))
    if values.dtype.kind == "f":
        wrong |= values != np.floor(values)
    if wrong.any():
        index = int(np.argmax(wrong))
        row = index if block.counts is None else int(np.searchsorted(np.cumsum(block.counts), index, "right"))
        raise BalanceError(
            f"{file}, {block.place(row)} is {str(raw[index])[:80]}: a length is a whole number of tokens, from 0 to "
            f"{MAX_LENGTH}. Correct it or leave the sample out."
        )
    return values.astype(np.int64)


def _number(value: object) -> float:
    """A value of a text; NaN where it is not a number."""
    with contextlib.suppress(OverflowError, TypeError, ValueError):
        return math.nan if isinstance(value, bool) else float(cast("Any", value))
    return math.nan


def _choose(names: Sequence[str], *, source: str, key: str | None, kind: str) -> str:
    """The name that holds the lengths among those of an archive, a table or a record."""
    listed = ", ".join(names[:9]) + (", …" if len(names) > 9 else "") or "none"
    if key is not None and key not in names:
        raise BalanceError(f"{source} has no {kind} {key!r} (--key); it has {listed}.")
    matches = [name for name in (DEFAULT_KEYS if key is None else (key,)) if name in names]
    if not matches and len(names) == 1 and kind != "field":
        return names[0]
    if not matches:
        missing = " or ".join(map(repr, DEFAULT_KEYS))
        raise BalanceError(f"{source} has no {kind} {missing}, but {listed}; name the lengths with --key.")
    return matches[0]


def _read_npy(file: Path, stream: BinaryIO, _: str | None, place: str = "index {}") -> Iterator[_Block]:
    # By blocks no memory is taken for what the header claims; pickled objects, which can run code, are refused.
    header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    shape, _order, dtype = header[np.lib.format.read_magic(stream)](stream)
    if dtype.kind not in "iuf" or len(shape) > 1:
        raise BalanceError(f"{file} holds {dtype} values of shape {list(shape)}; lengths are integers, [num_samples].")
    size = math.prod(shape)
    for first in range(0, size, _BLOCK):
        count = min(size - first, _BLOCK)
        values = np.frombuffer(stream.read(count * dtype.itemsize), dtype)
        if values.size < count:
            raise ValueError(f"it holds {first + values.size} values, and its header claims {size}")
        yield _Block(values, lambda index, first=first: place.format(first + index))


def _read_npz(file: Path, stream: BinaryIO, key: str | None) -> Iterator[_Block]:
    with zipfile.ZipFile(stream) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        name = _choose(names, source=str(file), key=key, kind="array")
        with archive.open(f"{name}.npy") as member:
            yield from _read_npy(file, cast("BinaryIO", member), None, f"array {name!r}, index {{}}")


def _lines(stream: BinaryIO) -> Iterator[tuple[int, list[str]]]:
    """Blocks of lines, each with the number of its first one."""
    number, tail, at_end = 1, b"", False
    while not at_end:
        chunk = stream.read(2**20)
        *lines, tail = (tail + chunk).split(b"\n")
        if at_end := not chunk:
            lines = [tail]
        elif len(tail) > MAX_LINE:
            raise ValueError(f"line {number + len(lines)} has more than {MAX_LINE} bytes")
        if number > MAX_LENGTHS:
            raise ValueError(f"it has more than {MAX_LENGTHS} lines")
        if lines:
            yield number, b"\n".join(lines).decode("utf-8-sig" if number == 1 else "utf-8").split("\n")
        number += len(lines)


def _read_jsonl(file: Path, stream: BinaryIO, key: str | None) -> Iterator[_Block]:
    for number, lines in _lines(stream):
        numbers = [number + at for at, line in enumerate(lines) if line.strip()]
        texts = [lines[at - number] for at in numbers]
        rows: list[object] = []
        with contextlib.suppress(ValueError, RecursionError):  # at once, which is faster
            rows = json.loads(f"[{','.join(texts)}]")
        if len(rows) != len(texts):
            rows = [_json_of(text, f"{file}, line {at}") for at, text in zip(numbers, texts, strict=True)]
        lists = [_lengths_of(row, f"{file}, line {at}", key) for at, row in zip(numbers, rows, strict=True)]
        values = list(chain.from_iterable(lists))
        yield _Block(values, lambda row, numbers=numbers: f"line {numbers[row]}", list(map(len, lists)))


def _lengths_of(row: object, source: str, key: str | None) -> list[object]:
    """Those of a row: a number, a list of them, or an object with either, or with tokens."""
    if isinstance(row, dict):
        fields = cast("dict[str, object]", row)
        name = key or next((name for name in DEFAULT_KEYS if name in fields), "")
        if name not in fields:
            name = _choose(list(fields), source=source, key=key, kind="field")
        row = fields[name]
        if isinstance(row, list) and name not in DEFAULT_KEYS[:2]:
            return [len(cast("list[object]", row))]
    return cast("list[object]", row) if isinstance(row, list) else [row]


def _json_of(text: str, source: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BalanceError(f"{source} is not JSON: {error}. Write one value a line.") from error


def _read_parquet(file: Path, stream: BinaryIO, key: str | None) -> Iterator[_Block]:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise BalanceError(f"{file}: reading parquet needs pyarrow; pip install '.[report]' in a clone.") from error
    with parquet.ParquetFile(stream) as table:
        schema, first = table.schema_arrow, 0
        name = _choose(list(schema.names), source=str(file), key=key, kind="column")
        is_list = hasattr(schema.field(name).type, "value_type") and "list" in str(schema.field(name).type)
        for batch in table.iter_batches(batch_size=2**10 if is_list else _BLOCK, columns=[name]):
            column = batch.column(0)
            values = (column.value_lengths() if is_list else column).to_numpy(zero_copy_only=False)
            if values.dtype.kind not in "iuf":
                raise BalanceError(f"{file}, column {name!r} holds {column.type}: lengths are integers.")
            yield _Block(values, lambda row, first=first: f"column {name!r}, row {first + row}")
            first += len(values)


_IDX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the tokens' type, number of sequences, number of document bounds."""


def _read_idx(file: Path, stream: BinaryIO, _: str | None) -> Iterator[_Block]:
    """Tokens of each sequence: int32 behind the header, then int64 places in the `.bin`, and bounds of documents."""
    header = stream.read(_IDX_HEADER.size)
    if not header.startswith(b"MMIDIDX\0\0"):
        raise BalanceError(f"{file} is not the index of a Megatron data set: it does not begin with MMIDIDX.")
    _, version, _, num_sequences, num_bounds = _IDX_HEADER.unpack(header)
    if version != 1 or _IDX_HEADER.size + 12 * num_sequences + 8 * num_bounds > file.stat().st_size:
        raise BalanceError(f"{file} is cut off, or of version {version}: version 1 of Megatron's index is read.")
    for first in range(0, num_sequences, _BLOCK):
        tokens = np.frombuffer(stream.read(4 * min(num_sequences - first, _BLOCK)), dtype="<i4")
        yield _Block(tokens, lambda index, first=first: f"sequence {first + index}")


_READERS: dict[str, tuple[Callable[[Path, BinaryIO, str | None], Iterator[_Block]], str]] = {
    ".npy": (_read_npy, "an .npy array of integers, as numpy writes it"),
    ".npz": (_read_npz, "an .npz archive of integers, as numpy writes it"),
    ".jsonl": (_read_jsonl, "UTF-8 text"),
    ".txt": (_read_jsonl, "UTF-8 text"),
    ".parquet": (_read_parquet, "a parquet file"),
    ".idx": (_read_idx, "an index"),
}
"""By suffix the reader, and what it reads."""

_SEEKING = (".npz", ".parquet", ".idx")
"""Read at several places, so not unpacked from `.gz`."""
