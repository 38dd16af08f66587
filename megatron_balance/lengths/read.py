"""Reads sample lengths from a file, block by block, and no further than asked: a file may be larger than memory.

Every reader yields blocks of raw values, in the order of training; a check then turns them into int64, so that a wrong
value is named by file, row and value in every format.
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
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.lengths.rows import MAX_LENGTHS, Rows

MAX_LENGTH = 2**31 - 1
"""Longest sample, tokens: cu_seqlens are int32."""

MAX_LINE = 2**26
"""Longest line of a text, bytes."""

DEFAULT_KEYS = ("length", "num_tokens", "seq_lengths", "input_ids")
"""Names under which a length is looked for when no key is given."""

_BLOCK = 2**16

Progress = Callable[[int], None]
"""Told how many rows are read."""

_Block = tuple[NDArray[Any] | Sequence[object], Sequence[int] | None]
"""Raw values of neighbouring rows, and the number of values of each row; None for 1."""


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
            the lengths packed into it; `.txt` with one number a line; both texts also with `.gz`; `.parquet` (needs
            pyarrow); the `.idx` of a Megatron data set, or its path without suffix, whose sequences are the documents
            of GPTDataset; `-`, the lines of the standard input.
        key: array, column or JSON field that holds the lengths, or lists of tokens that are counted. Without it
            `length`, `num_tokens`, `seq_lengths` (of a packed row) or `input_ids` is taken, or the only array or column
            there is.
        limit: rows to read; None for all of them, at most `MAX_LENGTHS`.

    Raises:
        BalanceError: the file is missing, empty, too long or of an unknown kind; columns are several and none is
            named; a length is negative, fractional, NaN or above `MAX_LENGTH`.
    """
    file = Path(path)
    if not file.suffix and (index := file.with_name(f"{file.name}.idx")).is_file():
        file = index
    name = str(file).lower()
    suffix = ".txt" if name == "-" else "".join(Path(name).suffixes[-2 if name.endswith(".gz") else -1 :])
    reader = _READERS.get(suffix)
    if reader is None:
        raise BalanceError(f"{file}: unknown suffix {suffix!r}; use one of {', '.join(_READERS)}.")
    if key is not None and suffix in (".npy", ".idx"):
        raise BalanceError(f"{file} holds lengths without names: leave out --key {key}.")
    try:
        return _collect(file, reader(file, key), limit=limit, progress=progress)
    except BalanceError:  # a ValueError that says enough
        raise
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise BalanceError(
            f"{file} cannot be read as {suffix}: {reason}; give a file of lengths, or synthetic:NAME."
        ) from error


def read_tokens(path: str | Path, *, key: str | None = None, limit: int | None = None) -> list[NDArray[np.int64]]:
    """Read lists of tokens, of `input_ids` or another `key`, from `.jsonl`, `.jsonl.gz` or `.parquet`."""
    file, name = Path(path), key or "input_ids"
    try:
        rows = islice(_token_lists(file, name), limit)
        return [np.array(row, dtype=np.int64).reshape(len(row)) for row in rows]
    except (*_UNREADABLE, TypeError) as error:
        raise BalanceError(f"{file} has no lists of tokens {name!r}: {error}; name them with --key.") from error


def _token_lists(file: Path, name: str) -> Iterator[Any]:
    if file.suffix == ".parquet":
        with _open_parquet(file) as table:
            _choose(list(table.schema_arrow.names), source=str(file), key=name, kind="column")
            for batch in table.iter_batches(batch_size=_BLOCK, columns=[name]):
                yield from batch.column(0).to_numpy(zero_copy_only=False)
        return
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as stream:
        for texts in _lines(cast("BinaryIO", stream)):
            for text in texts:
                row: Any = json.loads(text)
                yield row.get(name) if isinstance(row, dict) else None


def dataset_lengths(
    dataset: Any, *, column: str | None = None, length: Callable[[Any], int] | None = None
) -> Sequence[Any] | NDArray[np.int64]:
    """Lengths of a data set in its order, as `BalancedBatchSampler` takes them.

    Args:
        dataset: rows by position, dictionaries, or a `datasets.Dataset`; or a file that
            `megatron-balance compare --save-lengths` wrote, or any other that `read_lengths` reads.
        column: of lengths, of tokens, or `seq_lengths` of packs; None for the first there is of `length`,
            `num_tokens`, `seq_lengths` and `input_ids`.
        length: tokens of a row, where no column has them.

    Returns:
        `[num_rows]` tokens, or lists of them where rows are packs.

    Raises:
        BalanceError: the data set has no such column, the file cannot be read, or a length is none.

    Example:
        >>> from megatron_balance.loaders import dataset_lengths
        >>> dataset_lengths([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
        array([3, 1])
    """
    if length is not None:
        return [length(dataset[row]) for row in range(len(dataset))]
    if isinstance(dataset, str | Path):
        rows = read_rows(dataset, key=column)
    else:
        names: list[str] | None = getattr(dataset, "column_names", None)
        name = _choose(names or [*dataset[0]], source="the data set", key=column, kind="field")
        values = dataset[name] if names else (row[name] for row in dataset)
        plain = (value.tolist() if hasattr(value, "tolist") else value for value in values)
        lists = [_lengths_of({name: value}, "the data set", name) for value in plain]
        block = list(chain.from_iterable(lists)), list(map(len, lists))
        rows = _collect(Path("the data set"), iter([block]), limit=None, progress=None)
    return rows.lengths if (rows.counts == 1).all() else np.split(rows.lengths, rows.counts.cumsum()[:-1])


_UNREADABLE = (
    *(ValueError, LookupError, EOFError, MemoryError, RuntimeError, SyntaxError, OSError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


def _collect(file: Path, blocks: Iterator[_Block], *, limit: int | None, progress: Progress | None) -> Rows:
    """The checked values of all blocks up to `limit` rows."""
    parts: list[NDArray[np.int64]] = []
    counts: list[NDArray[np.int64]] = []
    num_rows = 0
    for raw, values_of_rows in blocks:
        row_counts = np.array(values_of_rows or np.ones(len(raw)), np.int64)
        values = raw if isinstance(raw, np.ndarray) else np.array([_number(value) for value in raw])
        # Written so that NaN is wrong as well.
        wrong = ~((values >= 0) & (values <= MAX_LENGTH) & (values == np.floor(values)))
        if wrong.any():
            index = int(np.argmax(wrong))
            row = num_rows + 1 + int(np.searchsorted(np.cumsum(row_counts), index, "right"))
            raise BalanceError(
                f"{file}, row {row} is {str(raw[index])[:80]}: a length is a whole number of tokens, from 0 to "
                f"{MAX_LENGTH}. Correct it or leave the sample out."
            )
        counts.append(row_counts[: None if limit is None else limit - num_rows])
        parts.append(values[: counts[-1].sum()].astype(np.int64))
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


def _number(value: object) -> float:
    """A value of a text; NaN where it is no number, or more than arrays hold."""
    is_number = type(value) in (int, float) and abs(cast("float", value)) < 2**63
    return cast("float", value) if is_number else math.nan


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


def _read_numpy(file: Path, key: str | None) -> Iterator[_Block]:
    # An array is mapped: no memory is taken for what its header claims. Objects, which can run code, are refused.
    content = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(content, np.ndarray):
        with content as archive:
            name = _choose(archive.files, source=str(file), key=key, kind="array")
            num_bytes = archive.zip.getinfo(f"{name}.npy").file_size
            if num_bytes > 8 * MAX_LENGTHS + _BLOCK:
                raise ValueError(f"array {name!r} has {num_bytes} bytes, more than {MAX_LENGTHS} lengths")
            content = archive[name]
    if content.dtype.kind not in "iuf" or content.ndim > 1:
        raise ValueError(
            f"it holds {content.dtype} values of shape {list(content.shape)}, and lengths are integers, [num_samples]"
        )
    yield from _blocks(content)


def _blocks(values: NDArray[Any]) -> Iterator[_Block]:
    for first in range(0, values.size, _BLOCK):
        yield np.array(values.reshape(-1)[first : first + _BLOCK]), None


def _lines(stream: BinaryIO) -> Iterator[list[str]]:
    """Blocks of lines that are not blank, in bounded memory."""
    tail, encoding, at_end = b"", "utf-8-sig", False
    while not at_end:
        chunk = stream.read(2**20)
        *lines, tail = (tail + chunk).split(b"\n")
        if at_end := not chunk:
            lines = [tail]
        elif len(tail) > MAX_LINE:
            raise ValueError(f"a line has more than {MAX_LINE} bytes")
        if lines:
            yield [text for text in b"\n".join(lines).decode(encoding).split("\n") if text.strip()]
            encoding = "utf-8"


def _read_text(file: Path, key: str | None) -> Iterator[_Block]:
    num_rows, opener = 0, gzip.open if file.suffix.lower() == ".gz" else open
    with contextlib.nullcontext(sys.stdin.buffer) if str(file) == "-" else opener(file, "rb") as stream:
        for texts in _lines(cast("BinaryIO", stream)):
            rows: list[object] = []
            with contextlib.suppress(ValueError, RecursionError):  # at once, which is faster
                rows = json.loads(f"[{','.join(texts)}]")
            first = num_rows + 1
            if len(rows) != len(texts):
                rows = [_json_of(text, f"{file}, row {row}") for row, text in enumerate(texts, start=first)]
            lists = [_lengths_of(value, f"{file}, row {row}", key) for row, value in enumerate(rows, start=first)]
            yield list(chain.from_iterable(lists)), list(map(len, lists))
            num_rows += len(rows)


def _lengths_of(row: object, source: str, key: str | None) -> list[object]:
    """Those of a row: a number, a list of them, or an object with either, or with tokens."""
    if isinstance(row, dict):
        fields = cast("dict[str, object]", row)
        name = key or next((name for name in DEFAULT_KEYS if name in fields), "")
        if name not in fields:
            name = _choose(list(fields), source=source, key=key, kind="field")
        row = fields[name]
        if isinstance(row, list) and name not in DEFAULT_KEYS[:3]:
            return [len(cast("list[object]", row))]
    return cast("list[object]", row) if isinstance(row, list) else [row]


def _json_of(text: str, source: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BalanceError(f"{source} is not JSON: {error}. Write one value a line.") from error


def _open_parquet(file: Path) -> Any:
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise BalanceError(f"{file}: reading parquet needs pyarrow; pip install '.[report]' in a clone.") from error
    return parquet.ParquetFile(file)


def _read_parquet(file: Path, key: str | None) -> Iterator[_Block]:
    with _open_parquet(file) as table:
        name = _choose(list(table.schema_arrow.names), source=str(file), key=key, kind="column")
        for batch in table.iter_batches(batch_size=_BLOCK, columns=[name]):
            column = batch.column(0)
            is_list = hasattr(column.type, "value_type") and "list" in str(column.type)
            values = (column.value_lengths() if is_list else column).to_numpy(zero_copy_only=False)
            if values.dtype.kind not in "iuf":
                raise ValueError(f"column {name!r} holds {column.type}, and lengths are integers")
            yield values, None


_IDX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the tokens' type, number of sequences, number of document bounds."""


def _read_idx(file: Path, _: str | None) -> Iterator[_Block]:
    """Tokens of each sequence: int32 behind the header, then int64 places in the `.bin`, and bounds of documents."""
    with file.open("rb") as stream:
        magic, version, _code, num_sequences, num_bounds = _IDX_HEADER.unpack(stream.read(_IDX_HEADER.size))
    if magic != b"MMIDIDX\0\0" or version != 1:
        raise ValueError("it does not begin with MMIDIDX, version 1, as the index of a Megatron data set")
    if _IDX_HEADER.size + 12 * num_sequences + 8 * num_bounds > file.stat().st_size:
        raise ValueError("it is cut off")
    yield from _blocks(np.memmap(file, dtype="<i4", mode="r", offset=_IDX_HEADER.size, shape=(num_sequences,)))


_READERS: dict[str, Callable[[Path, str | None], Iterator[_Block]]] = {
    ".npy": _read_numpy,
    ".npz": _read_numpy,
    ".jsonl": _read_text,
    ".jsonl.gz": _read_text,
    ".txt": _read_text,
    ".txt.gz": _read_text,
    ".parquet": _read_parquet,
    ".idx": _read_idx,
}
"""By suffix."""
