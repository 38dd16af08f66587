"""Training loops that hand other iterators to Megatron's train_step than Megatron's own loop does.

The variable LOOP names one of them. The items are those of Megatron's loader, in its order.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Iterator
from itertools import count
from typing import Any

STEPS_OF_ITERATOR = {"a new iterator each step": 1, "epochs of three steps": 3}
"""Loops whose iterators end."""

WRAPPED_ANEW = "the loader wrapped anew each step"


def main() -> None:
    """Train, and record as record_steps.py does."""
    _use(os.environ["LOOP"])
    importlib.import_module("record_steps").main()


def _use(loop: str) -> None:
    """Have train_step get iterators as this loop makes them."""
    training: Any = importlib.import_module("megatron.training.training")
    stock = training.train_step
    lasting: dict[int, Any] = {}  # place among the chunks of a virtual pipeline → iterator
    steps = count()

    @functools.wraps(stock)
    def train_step(forward_step_func: Any, data_iterator: Any, *positional: Any, **keywords: Any) -> Any:
        step = next(steps)
        chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        for place, chunk in enumerate(chunks):
            if chunk is None:
                lasting[place] = None
            elif loop == WRAPPED_ANEW:
                lasting[place] = type(chunk)(chunk.iterable)
            elif step % STEPS_OF_ITERATOR[loop] == 0:
                lasting[place] = type(chunk)(_next_items(chunk, num_steps=STEPS_OF_ITERATOR[loop]))
        ours = [lasting[place] for place in range(len(chunks))]
        return stock(forward_step_func, ours if isinstance(data_iterator, list) else ours[0], *positional, **keywords)

    training.train_step = train_step


def _next_items(loader: Any, *, num_steps: int) -> Iterator[Any]:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    # All at once: nobody else's iterator may be behind this one.
    return iter([next(loader.iterable) for _ in range(num_steps * get_num_microbatches())])
