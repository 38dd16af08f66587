"""Opens parquet files with pyarrow, an optional package."""

from __future__ import annotations

import importlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError


@contextmanager
def open_parquet(file: Path, *, extra: str) -> Generator[Any, None, None]:
    """A pyarrow.parquet.ParquetFile; errors of pyarrow inside the block become errors about this file.

    Args:
        file: the parquet file.
        extra: the extra of this package that installs pyarrow, for the message.

    Raises:
        BalanceError: pyarrow is missing, or the file is not parquet or is damaged.
    """
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow_error = importlib.import_module("pyarrow").ArrowException
    except ImportError as error:
        raise BalanceError(
            f"{file}: reading parquet needs pyarrow; install it with `pip install 'megatron-balance[{extra}]'`."
        ) from error
    try:
        with parquet.ParquetFile(file) as table:
            yield table
    except arrow_error as error:
        raise BalanceError(f"{file} is not a parquet file: {error}") from error
