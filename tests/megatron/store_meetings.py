"""record_steps, with the meetings in the key-value store that each rank was in before its first step."""

from __future__ import annotations

import functools
from typing import Any, TextIO

import record_steps

from megatron_balance.hooking.patches import Function
from megatron_balance.runtime import agreement


def main() -> None:
    """Train."""
    topics: list[str] = []
    meet = agreement._meet

    def counted(text: str, *, topic: str, **keywords: Any) -> str:
        topics.append(topic)
        return meet(text, topic=topic, **keywords)

    def recorded(train_step: Function, *, out: TextIO) -> Function:
        @functools.wraps(train_step)
        def wrapper(*positional: Any, **keywords: Any) -> Any:
            step = record_steps.recorded(train_step, out=out, topics=list(topics))
            return step(*positional, **keywords)

        return wrapper

    agreement._meet = counted
    record_steps.train_wrapped(recorded, why="records the meetings before the step")


if __name__ == "__main__":
    main()
