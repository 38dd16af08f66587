"""Balances Megatron's evaluation: forward-only steps are packed and moved as those of training are.

Megatron sums the losses and tokens of micro-batches and divides the sums, which no packing changes. Under `--sft` it
averages the means of micro-batches, over micro-batches, ranks and iterations, so that another packing is another
number. Balanced evaluation has Megatron divide sums in every case.

Invariants: iterations, items that are read, and consumed samples are stock; steps of training and of evaluation are
made one at a time: the next training step may be in preparation when an evaluation begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.training_loop import LoopState
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.prefetcher import StepPrefetcher
from megatron_balance.topology import Limits


class BalancedEvaluation:
    """The forward-only steps of Megatron's `evaluate`; `last_step` is the data of the newest, for tests."""

    def __init__(self, training: StepPrefetcher, *, limits: Limits, state: LoopState) -> None:
        self.last_step: BalancedStep | None = None
        self._prefetcher = StepPrefetcher(
            training.planner.of_evaluation(limits), replica=training.replica, thread=training.thread
        )
        self._state = state
        self._steps_left = 0

    @contextlib.contextmanager
    def running(self, num_steps: int) -> Iterator[None]:
        """Balance the forward-only steps in this context, Megatron's `evaluate` of so many iterations."""
        self._steps_left = num_steps
        try:
            with self._state.with_args(sft=False):
                yield
        finally:
            self._steps_left = 0

    def balances(self, arguments: Mapping[str, Any]) -> bool:
        """True if a forward-only call of a schedule is an iteration of `evaluate`, which all ranks run."""
        return self._steps_left > 0 and not arguments.get("collect_non_loss_data")

    def step(self, source: Any, *, num_microbatches: int, overlap: bool, name: str) -> BalancedStep:
        """The data of one iteration; the next is prepared where steps overlap."""
        self.last_step = self._prefetcher.balance(source, num_microbatches=num_microbatches)
        self._steps_left -= 1
        if overlap and self._steps_left:
            self._prefetcher.prepare(source, num_microbatches=num_microbatches, name=name)
        return self.last_step

    @staticmethod
    def check_sums(loss_dicts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Refuse a loss that is a mean, which depends on packing: a schedule must return a sum and its tokens."""
        for name, loss in (loss_dicts[0] if loss_dicts else {}).items():
            if loss.numel() != 2:
                raise BalanceError(
                    f"The loss function reports {name!r} as {loss.numel()} numbers in evaluation: a balanced one needs "
                    "the sum over tokens and their number. Return both, or set --no-balance-evaluation."
                )
