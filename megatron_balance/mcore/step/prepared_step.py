"""A step that a thread prepared, and the items by which the step that begins recognizes it."""

from __future__ import annotations

import operator
from dataclasses import KW_ONLY, dataclass
from typing import Any

from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.pull_ahead import Fetched, PullAhead


@dataclass(frozen=True)
class Pulled:
    """The items that a step pulled.

    Attributes:
        ahead: their source.
        fetched: the items.
        new_iterator: it is not the source of the last step.
    """

    ahead: PullAhead
    fetched: Fetched
    _: KW_ONLY
    new_iterator: bool


@dataclass(frozen=True)
class PreparedStep:
    """A step's data, made by the thread.

    Attributes:
        ahead: source of the items; None where this rank loads no data.
        items: items of the step.
        step: the data.
    """

    ahead: PullAhead | None
    items: list[Any]
    step: BalancedStep

    def is_of(self, pulled: Pulled) -> bool:
        """True if the step pulled these items from the same iterator; a growing batch size pulls more."""
        items = pulled.fetched.items
        same = len(items) == len(self.items) and all(map(operator.is_, items, self.items))
        return pulled.ahead is self.ahead and pulled.fetched.failure is None and same
