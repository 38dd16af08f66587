"""What a file of someone else's holds, read without trust: JSON, and numpy's arrays.

Such a file may be cut off, be something else under another name, or be made to harm. Nothing in it is run: arrays
hold numbers and texts, never pickled objects.

Invariants: a file that cannot be read raises ValueError or OSError, and nothing else; memory is taken for what is in
the file, not for what its header claims; no name inside an archive becomes a path.
"""

from __future__ import annotations

import json
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from lzma import LZMAError
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_ARCHIVE_BYTES = 2**31
"""Of all arrays of one archive, unpacked: a small file can unpack to more than a machine holds."""

_DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    LZMAError,
    MemoryError,
    RuntimeError,
    SyntaxError,
    TypeError,
    struct.error,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile and numpy raise at damaged files, beside ValueError and OSError."""


def parse_json(text: str | bytes) -> Any:
    """JSON as Python objects.

    Raises:
        ValueError: it is no JSON, or nested deeper than Python follows.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deeply") from error


@contextmanager
def opened_archive(path: Path, *, unbounded: bool = False) -> Generator[Mapping[str, NDArray[Any]], None, None]:
    """The arrays of an `.npz` file, each read when it is asked for.

    Args:
        path: the file.
        unbounded: it may be as large as what a training run had in memory, beside which it lies.

    Raises:
        ValueError: it is damaged, is no archive, lacks an array that is asked for, or unpacks to more than
            `MAX_ARCHIVE_BYTES`.
        OSError: it cannot be read.
    """
    with readable_arrays():
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > MAX_ARCHIVE_BYTES and not unbounded:
            raise ValueError(f"it unpacks to {unpacked} bytes, and at most {MAX_ARCHIVE_BYTES} are read")
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays


@contextmanager
def readable_arrays() -> Generator[None, None, None]:
    """Around what reads arrays of a file: whatever a damaged one raises becomes a ValueError."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
