"""Files that are there whole or not at all, whenever a process is killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Write a file that takes its place, and that of an older one, once it is on the disk.

    Args:
        path: of the file; its folder is made where it is missing.

    Raises:
        OSError: it cannot be written; what was there before is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Begins with a dot: whoever looks for files by their name does not find one that is half written.
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
