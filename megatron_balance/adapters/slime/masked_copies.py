"""Fills micro-batches that would stay empty with copies of a sample whose loss is masked.

Every data-parallel rank runs the same number of micro-batches, and slime's trainer cannot run an empty one. Where
micro-batches would stay empty (five samples that fill one each, on four ranks), a rank runs a copy of the step's
shortest sample with a loss mask of zeros: slime's own way to take a sample out of the loss (`Sample.remove_sample`).
Loss and gradients do not change.

Invariant: a copy has a loss mask of zeros before it leaves the RolloutManager, and `partition` then holds
plain integers.
"""

from __future__ import annotations

from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.hooking.patches import Function


class MaskedCopy(int):
    """Position in the rollout batch of a sample that also runs elsewhere; the loss of this copy is masked."""


class MaskCopies:
    """Replaces slime's `tensorize_rollout_data_for_training`, the last function before a rank's data is sent.

    An object instead of a wrapped function, for the reason given at `BalancedDpSchedule`.
    """

    def __init__(self, stock: Function) -> None:
        self._stock = stock

    def __call__(self, rollout_data: dict[str, Any]) -> None:
        """Masks the copies of one rank in place, then calls slime's function.

        Args:
            rollout_data: data that slime packs for the rank; `partition` are the positions of its samples.

        Raises:
            BalanceError: there are copies, and no loss masks to mask them with.
        """
        partition = rollout_data.get("partition", [])
        copies = [index for index, sample in enumerate(partition) if isinstance(sample, MaskedCopy)]
        if copies:
            if "loss_masks" not in rollout_data:
                raise BalanceError(
                    "the rollout data has no loss_masks, and a step has fewer samples than micro-batches: let "
                    "--custom-convert-samples-to-train-data-path give loss_masks, or raise --max-tokens-per-gpu."
                )
            masks = list(rollout_data["loss_masks"])
            for index in copies:
                masks[index] = [0] * len(masks[index])
            rollout_data["loss_masks"] = masks
            rollout_data["partition"] = [int(sample) for sample in partition]
        self._stock(rollout_data)
