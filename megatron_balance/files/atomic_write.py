"""Atomic file writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a file completely to disk, then rename it to its path, over an older one.

    Args:
        path: the file; its folder is made if it is missing.

    Raises:
        OSError: it cannot be written; an older file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name with a dot in front matches no pattern for finished files.
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
