"""The loop of a planning process: reads global batches from a connection and answers with their plans.

It imports numpy and the planner, neither torch nor Megatron, and ends with the process that started it, also in the
middle of a plan: a thread reads the connection all the time, and its end is the end of the process. Children that the
parent forks hold the connection open as well, so the parent's id is compared, too.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.planner.build import build_data_schedule

PARENT_CHECK_SECONDS = 1.0
"""Time between two looks at the parent's id."""


def serve(number: int, *, parent: int) -> None:
    """Answers requests until the parent ends.

    A request is the keywords of `build_data_schedule`. The answer is `(plan, None)`, or `(None, error)` with the
    BalanceError of the arguments, or `(None, text)` with the traceback of any other error.

    Args:
        number: file descriptor of this end of the connection.
        parent: process id of the other end.
    """
    connection: Connection[Any, Any] = Connection(number)
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def read() -> None:
        try:
            while os.getppid() == parent:
                if connection.poll(PARENT_CHECK_SECONDS):
                    requests.put(connection.recv())
        except (EOFError, OSError):
            pass
        finally:
            os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        connection.send(_answer(requests.get()))


def _answer(request: dict[str, Any]) -> tuple[Any, Any]:
    try:
        return build_data_schedule(**request), None
    except BalanceError as error:
        return None, error
    except Exception:  # noqa: BLE001 - sent to the parent, which warns and makes its plans itself
        return None, traceback.format_exc()


if __name__ == "__main__":
    serve(int(sys.argv[1]), parent=int(sys.argv[2]))
