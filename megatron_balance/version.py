"""The version of the package, and a digest of its sources: clones of different commits have one version."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

__version__ = "0.2.0.dev0"

_KINDS = {".py", ".json", ".txt"}


@functools.cache
def build_version() -> str:
    """The version and, after `+`, ten digits of a digest of the package's files: what ranks compare."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _KINDS):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return f"{__version__}+{digest.hexdigest()[:10]}"
