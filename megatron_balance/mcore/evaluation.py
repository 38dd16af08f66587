"""Balances Megatron's evaluation: forward-only steps are packed and moved as those of training are.

Megatron sums the losses and tokens of micro-batches and divides the sums, which no packing changes. Under `--sft` it
averages the means of micro-batches, over micro-batches, ranks and iterations, so that another packing is another
number. Balanced evaluation has Megatron divide sums in every case.

Invariants: iterations, items that are read, and consumed samples are stock; nothing of training's prefetcher is used:
its thread may be preparing the next training step over a group of its own meanwhile.
"""

# Megatron types its getters Optional; before training they are not.
# pyright: reportArgumentType=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.replica_setup import loads_here, prefetcher_of
from megatron_balance.mcore.setup.groups import data_group
from megatron_balance.mcore.setup.megatron_state import MegatronState
from megatron_balance.mcore.setup.run_setup import RunSetup
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.planner import StepPlanner
from megatron_balance.mcore.step.prefetcher import StepPrefetcher


class BalancedEvaluation:
    """The forward-only steps of Megatron's `evaluate`.

    Args:
        prefetcher: of evaluation alone.
        state: of Megatron.
        overlap: prepare the next step while one runs.

    Attributes:
        last_step: the data of the newest step, for tests.
    """

    def __init__(self, prefetcher: StepPrefetcher, *, state: MegatronState, overlap: bool) -> None:
        self.last_step: BalancedStep | None = None
        self._prefetcher = prefetcher
        self._state = state
        self._overlap = overlap
        self._steps_left = 0

    @contextlib.contextmanager
    def running(self, num_steps: int) -> Iterator[None]:
        """Balance the forward-only steps in this context, Megatron's `evaluate`.

        Args:
            num_steps: iterations of this evaluation.
        """
        self._steps_left = num_steps
        try:
            with self._state.sft_as(False):
                yield
        finally:
            self._steps_left = 0

    def balances(self, arguments: Mapping[str, Any]) -> bool:
        """True if a forward-only call of a schedule is an iteration of `evaluate`, which all ranks run."""
        return self._steps_left > 0 and not arguments.get("collect_non_loss_data")

    def step(self, source: Any, *, num_microbatches: int, on_lost: Callable[[BalanceError], None]) -> BalancedStep:
        """The data of one iteration; arguments and errors as for `StepPrefetcher`."""
        step = self._prefetcher.balance(source, num_microbatches=num_microbatches)
        self._steps_left -= 1
        if self._overlap and self._steps_left:
            self._prefetcher.prepare(source, num_microbatches=num_microbatches, on_lost=on_lost)
        self.last_step = step
        return step

    @staticmethod
    def check_sums(loss_dicts: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Check what a schedule returns: a sum and its tokens for every loss of each micro-batch.

        Raises:
            BalanceError: a loss that is a mean, which depends on packing.
        """
        for name, loss in (loss_dicts[0] if loss_dicts else {}).items():
            if loss.numel() != 2:
                raise BalanceError(
                    f"The loss function reports {name!r} as {loss.numel()} numbers in evaluation: a balanced one needs "
                    "the sum over tokens and their number. Return both, or set --no-balance-evaluation."
                )


def balanced_evaluation(
    setup: RunSetup,
    *,
    training: StepPrefetcher,
    state: MegatronState,
) -> BalancedEvaluation:
    """The evaluation of this rank, with a group of its own. Every rank of the world calls it.

    Args:
        setup: of the run.
        training: makes the steps of training.
        state: of Megatron.
    """
    of_training = training.planner
    planner = StepPlanner(
        setup.config,
        topology=setup.topology,
        limits=setup.config.limits(micro_batch_size=setup.eval_micro_batch_size, topology=setup.topology),
        cost_model=setup.cost_model,
        patch_values=setup.patch_values,
        dp_group=data_group(timeout=setup.timeout, loads=loads_here(setup)),
        dp_rank=of_training.dp_rank,
        cp_rank=of_training.cp_rank,
        ranks_per_node=of_training.ranks_per_node,
        pin_memory=torch.cuda.is_available(),
        timeout=setup.timeout,
    )
    prefetcher = prefetcher_of(planner, setup=setup, replica=training.replica)
    return BalancedEvaluation(prefetcher, state=state, overlap=setup.config.overlap)
