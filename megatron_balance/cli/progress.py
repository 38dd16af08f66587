"""Shows the progress of a long command: a bar by rich on a terminal, nothing in a pipe or a log."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[int, int], None]
"""Called with the amount done and the total."""


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Progress]:
    """A bar on standard error while the block runs; without a terminal or rich it stays silent."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    # Removed when done, so that only the command's own output stays.
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
