"""Reads sample lengths from a file, no further than asked, and names a wrong value by file, row and value."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from megatron_balance.errors import BalanceError
from megatron_balance.lengths.rows import MAX_LENGTHS, Rows

MAX_LENGTH = 2**31 - 1
"""Longest sample, tokens: cu_seqlens are int32."""

KEYS = ("length", "num_tokens", "seq_lengths", "input_ids")
"""Names under which a length is looked for when no key is given."""

_UNREADABLE = (ValueError, LookupError, MemoryError, RuntimeError, SyntaxError, OSError)


def read_lengths(path: str | Path, *, key: str | None = None, limit: int | None = None) -> NDArray[np.int64]:
    """The lengths of `read_rows`: `[num_sequences]` int64, tokens."""
    return read_rows(path, key=key, limit=limit).lengths


def read_rows(path: str | Path, *, key: str | None = None, limit: int | None = None) -> Rows:
    """Read sample lengths, in file order.

    Args:
        path: an `.npy` array; `.jsonl` or `.txt` with a line for each row: a number, an object, or a list of the
            lengths packed into it; `.parquet` (needs pyarrow); the `.idx` of a Megatron data set, or its path without
            suffix, whose sequences are the documents of GPTDataset; `-`, the lines of the standard input.
        key: column or JSON field that holds the lengths, or lists of tokens that are counted. Without it `length`,
            `num_tokens`, `seq_lengths` (of a packed row) or `input_ids` is taken.
        limit: rows to read; None for all of them.

    Raises:
        BalanceError: the file is missing, empty or of an unknown kind; it has no such key; a length is negative,
            fractional, NaN or above `MAX_LENGTH`.
    """
    file = file_of(path)
    read_array = {".npy": _read_npy, ".idx": _read_idx}.get(file.suffix.lower())
    try:
        if read_array is None:
            return _rows_of(islice(_read_records(file, key), limit), source=str(file), key=key)
        if key is not None:
            raise BalanceError(f"{file} holds lengths without names: leave out --key {key}.")
        values = np.array(read_array(file)[:limit])
        return _checked(values, np.ones(values.size, dtype=np.int64), source=str(file))
    except BalanceError:  # a ValueError that says enough
        raise
    except _UNREADABLE as error:
        reason = getattr(error, "strerror", None) or error
        raise BalanceError(f"{file} cannot be read: {reason}; give a file of lengths, or synthetic:NAME.") from error


def read_tokens(path: str | Path, *, key: str | None = None, limit: int | None = None) -> list[NDArray[np.int64]]:
    """Read lists of tokens, of `input_ids` or another `key`, from `.jsonl` or `.parquet`."""
    name = key or "input_ids"
    try:
        texts = [cast("Any", record)[name] for record in islice(_read_records(Path(path), name), limit)]
        return [np.array(text, dtype=np.int64).reshape(len(text)) for text in texts]
    except (*_UNREADABLE, TypeError) as error:
        raise BalanceError(f"{path} has no lists of tokens {name!r}: {error}; name them with --key.") from error


def dataset_lengths(dataset: Any, *, column: str | None = None) -> Sequence[Any] | NDArray[np.int64]:
    """Lengths of a data set in its order, as `BalancedBatchSampler` takes them.

    Args:
        dataset: rows by position, dictionaries, or a `datasets.Dataset`; or a file that `read_lengths` reads.
        column: of lengths, of tokens, or `seq_lengths` of packs; None for the first there is of `length`,
            `num_tokens`, `seq_lengths` and `input_ids`.

    Returns:
        `[num_rows]` tokens, or lists of them where rows are packs.

    Raises:
        BalanceError: the data set has no such column, the file cannot be read, or a length is none.

    Example:
        >>> from megatron_balance.loaders import dataset_lengths
        >>> dataset_lengths([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
        array([3, 1])
    """
    if isinstance(dataset, str | Path):
        rows = read_rows(dataset, key=column)
    else:
        names: list[str] | None = getattr(dataset, "column_names", None)
        if names:
            name = _choose(names, source="the data set", key=column)
            dataset = ({name: value} for value in dataset[name])
        rows = _rows_of(dataset, source="the data set", key=column)
    return rows.lengths if (rows.counts == 1).all() else np.split(rows.lengths, rows.counts.cumsum()[:-1])


def file_of(path: str | Path) -> Path:
    """The file that a path names: that of a Megatron data set is given without its suffix, too."""
    index = Path(f"{path}.idx")
    return index if not Path(path).suffix and index.is_file() else Path(path)


def _rows_of(records: Iterable[object], *, source: str, key: str | None) -> Rows:
    values: list[object] = []
    counts: list[int] = []
    for row, record in enumerate(records, start=1):
        lengths = _lengths_of(record, f"{source}, row {row}", key)
        values += lengths
        counts.append(len(lengths))
        if max(row, len(values)) > MAX_LENGTHS:
            raise BalanceError(f"{source} holds more than {MAX_LENGTHS} lengths: leave out --shuffle, or give a part.")
    return _checked(values, np.array(counts, dtype=np.int64), source=source)


def _lengths_of(record: object, source: str, key: str | None) -> list[object]:
    """Those of a row: a number, a list of them, or an object with either, or with tokens."""
    name, value = KEYS[0], record
    if isinstance(record, dict):
        fields = cast("dict[str, object]", record)
        name = _choose(fields, source=source, key=key)
        value = fields[name]
    value = cast("Any", value).tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list):
        return [value]
    is_pack = name in KEYS[:3]
    return cast("list[object]", value) if is_pack else [len(cast("list[object]", value))]


def _choose(names: Iterable[str], *, source: str, key: str | None) -> str:
    """The name that holds the lengths."""
    candidates = KEYS if key is None else (key,)
    for name in candidates:
        if name in names:
            return name
    listed = ", ".join(islice(names, 9))
    raise BalanceError(
        f"{source} has no {' or '.join(map(repr, candidates))}, but {listed}; name the lengths with --key."
    )


def _checked(raw: NDArray[Any] | list[object], counts: NDArray[np.int64], *, source: str) -> Rows:
    """Rows of `counts` values each, which must be lengths."""
    values = raw if isinstance(raw, np.ndarray) else np.array([_number(value) for value in raw])
    # Written so that NaN is wrong as well.
    wrong = ~((values >= 0) & (values <= MAX_LENGTH) & (values == np.floor(values)))
    if wrong.any():
        index = int(np.argmax(wrong))
        row = 1 + int(np.searchsorted(np.cumsum(counts), index, "right"))
        raise BalanceError(
            f"{source}, row {row} is {str(raw[index])[:80]}: a length is a whole number of tokens, from 0 to "
            f"{MAX_LENGTH}. Correct it or leave the sample out."
        )
    if not counts.size:
        raise BalanceError(f"{source} holds no lengths; it needs at least one sample.")
    return Rows(values.astype(np.int64), counts)


def _number(value: object) -> float:
    """A value of a text; NaN where it is no number, or more than arrays hold."""
    is_number = type(value) in (int, float) and abs(cast("float", value)) < 2**63
    return cast("float", value) if is_number else math.nan


def _read_npy(file: Path) -> NDArray[Any]:
    # Mapped, no memory is taken for what a header claims; objects, which can run code, are refused.
    content = np.lib.format.open_memmap(file, mode="r")
    if content.dtype.kind not in "iuf" or content.ndim != 1:
        raise ValueError(
            f"it holds {content.dtype} values of shape {list(content.shape)}, and lengths are integers, [num_samples]"
        )
    return content


def _read_idx(file: Path) -> NDArray[Any]:
    """Tokens of each sequence: int32 behind magic, version, type and two counts."""
    with file.open("rb") as stream:
        magic, _, num_sequences = stream.read(17), stream.read(1), int.from_bytes(stream.read(8), "little")
    if magic != b"MMIDIDX\0\0\1\0\0\0\0\0\0\0":
        raise ValueError("it does not begin with MMIDIDX, version 1, as the index of a Megatron data set")
    if 34 + 4 * num_sequences > file.stat().st_size:
        raise ValueError("it is cut off")
    return np.memmap(file, dtype="<i4", mode="r", offset=34, shape=(num_sequences,))


def _read_records(file: Path, key: str | None) -> Iterator[object]:
    """The values of lines, or of a column under its name."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        try:
            parquet: Any = importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise BalanceError(f"{file}: reading parquet needs pyarrow; pip install '.[report]' in a clone.") from error
        with parquet.ParquetFile(file) as table:
            name = _choose(table.schema_arrow.names, source=str(file), key=key)
            for batch in table.iter_batches(batch_size=1024, columns=[name]):  # rows may be long lists of tokens
                yield from ({name: value} for value in batch.column(0).to_numpy(zero_copy_only=False))
        return
    if suffix not in (".jsonl", ".txt") and str(file) != "-":
        raise BalanceError(f"{file}: unknown suffix {suffix!r}; use one of .npy, .jsonl, .txt, .parquet, .idx.")
    with contextlib.nullcontext(sys.stdin) if str(file) == "-" else file.open(encoding="utf-8-sig") as lines:
        for row, text in enumerate(filter(str.strip, lines), start=1):
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise BalanceError(f"{file}, row {row} is not JSON: {error}. Write one value a line.") from error
            yield record
