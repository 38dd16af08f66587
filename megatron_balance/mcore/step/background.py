"""A thread for work that must not delay training: jobs run one after another, in the order in which they came.

Jobs that meet other ranks go to one thread of each rank, in the same order on all of them; a group of ranks belongs to
one such thread. Then no job waits for one that another rank has queued behind it.

Invariants: the thread is joined before the interpreter ends, after the jobs that wait: one that still ran would be
killed inside native code. An error of a job is raised where its result is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from megatron_balance.runtime.resources import close_on_undo

T = TypeVar("T")


class BackgroundThread:
    """One thread, started by its first job.

    Args:
        name: of the thread, for people.
    """

    def __init__(self, name: str = "megatron_balance") -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        close_on_undo(self._executor.shutdown)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job.

        Returns:
            Its result or error, once it has run.
        """
        return self._executor.submit(job)
