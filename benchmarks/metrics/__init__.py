"""Benchmark: the cost of watching a run."""

from __future__ import annotations

import itertools
from typing import Any

WATCHED = (True, False, False, True)
"""The order of watched and unwatched steps, in which slow drift affects both equally."""


def same_batch_again(data_iterator: Any) -> Any:
    """An iterator that gives the next global batch again in every step."""
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import RerunDataIterator

    rows = [next(data_iterator) for _ in range(get_num_microbatches())]
    return RerunDataIterator(itertools.cycle(rows))
