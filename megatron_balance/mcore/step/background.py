"""A thread for work that must not delay training: jobs run one after another, in the order in which they came.

Jobs that meet other ranks go to one thread of each rank, in the same order on all of them; a group of ranks belongs to
one such thread. Then no job waits for one that another rank has queued behind it.

On a GPU the thread has the device of the thread that made it, and a stream of its own: a loader's `.cuda()` and the
copies back to the host would otherwise go to device 0, and wait behind the kernels of the step that runs. Its work
follows what was on the other stream when the job was submitted.

Invariants: the thread is joined before the interpreter ends, after the jobs that wait: one that still ran would be
killed inside native code. An error of a job is raised where its result is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from megatron_balance.runtime.resources import close_on_undo

T = TypeVar("T")


class BackgroundThread:
    """One thread, started by its first job.

    Args:
        name: of the thread, for people.
    """

    def __init__(self, name: str = "megatron_balance") -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._on_gpu = device is not None
        self._executor = ThreadPoolExecutor(1, name, initializer=_on_device, initargs=(device,))
        close_on_undo(self._executor.shutdown)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job.

        Returns:
            Its result or error, once it has run.
        """
        if not self._on_gpu:
            return self._executor.submit(job)
        submitted = torch.cuda.Event()
        submitted.record()

        def after_it() -> T:
            torch.cuda.current_stream().wait_event(submitted)
            return job()

        return self._executor.submit(after_it)


def _on_device(device: int | None) -> None:
    if device is not None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream())
