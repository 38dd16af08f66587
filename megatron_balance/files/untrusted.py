"""Reads untrusted files: JSON, and numpy's arrays.

Such a file may be cut off, have the wrong name, or be made to do harm. No code in it runs: arrays hold numbers and
texts, never pickled objects.

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
"""Limit on all arrays of one archive, unpacked: a small file can unpack to more than a machine holds."""

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
"""Errors that zipfile and numpy raise on damaged files, besides ValueError and OSError."""


def parse_json(text: str | bytes) -> Any:
    """Parses JSON.

    Raises:
        ValueError: it is not JSON, or nested too deeply for Python.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deeply") from error


@contextmanager
def opened_archive(path: Path) -> Generator[Mapping[str, NDArray[Any]], None, None]:
    """The arrays of an `.npz` file, each read on access.

    Args:
        path: the file.

    Raises:
        ValueError: it is damaged, is no archive, lacks a requested array, or unpacks to more than
            `MAX_ARCHIVE_BYTES`.
        OSError: it cannot be read.
    """
    with readable_arrays():
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > MAX_ARCHIVE_BYTES:
            raise ValueError(f"it unpacks to {unpacked} bytes, and at most {MAX_ARCHIVE_BYTES} are read")
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays


@contextmanager
def readable_arrays() -> Generator[None, None, None]:
    """Turns every error of reading a damaged array into a ValueError."""
    try:
        yield
    except _DAMAGE as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
