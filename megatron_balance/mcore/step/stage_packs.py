"""The micro-batches of a pipeline stage that loads no data: where their sequences start, and nothing else.

Between the first stage and the last, Megatron's own `get_batch` (pretrain_gpt.py and pretrain_hybrid.py, from 0.18)
takes `cu_seqlens`, `cu_seqlens_padded` and `max_seqlen` from a micro-batch and returns None for all other keys.

Invariant: they are equal to those of the pack that the stage would have received.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.own_slots import Microbatch, pinned
from megatron_balance.samples.packing import lengths_as_packed, sequence_starts
from megatron_balance.topology import Topology


class StageMicrobatch(dict[str, Tensor]):
    """Starts of the sequences of a micro-batch. Reading any other key is an error, since its values are not here."""

    def __missing__(self, key: Any) -> NoReturn:
        raise BalanceError(
            f"The forward step asks for '{key}' on a pipeline stage between the first and the last, which loads no "
            f"data: it has {', '.join(self)}. Set --balance-load-every-stage, or read the others on the first and last "
            "stage alone, as Megatron's own get_batch does."
        )


def stage_microbatches(step: BalancedStep, *, topology: Topology, pin_memory: bool = False) -> list[Microbatch]:
    """The micro-batches of a step on a stage that loads no data.

    Args:
        step: with sequence lengths.
        topology: the ranks.
        pin_memory: copy them to pinned memory, for a GPU.
    """
    assert step.sequence_lengths is not None, "ranks that load no data are sent them"
    sizes = step.cp_sizes or [topology.cp_size] * step.num_microbatches
    microbatches: list[Microbatch] = []
    for lengths, num_tokens, size in zip(step.sequence_lengths, step.microbatch_tokens, sizes, strict=True):
        multiple = topology.at_cp_size(size).token_multiple
        as_packed = lengths_as_packed(lengths, num_tokens=num_tokens, token_multiple=multiple)
        starts = sequence_starts(lengths, as_packed=as_packed, cp_size=size)
        microbatches.append(starts)
    return [StageMicrobatch(starts) for starts in (pinned(microbatches) if pin_memory else microbatches)]
