"""The data of one step on one rank, and the text by which ranks of its replica that load none learn of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.mcore.step.figures import Figures
from megatron_balance.planner import DataSchedule

Microbatch = dict[str, Tensor]


@dataclass(frozen=True)
class Slots:
    """The micro-batches of a rank, in the order in which they run."""

    cp_sizes: list[int]  # context-parallel ranks that share each
    num_tokens: list[int]  # over those ranks, padding and filler included
    sequence_lengths: list[list[int]]  # without padding and filler; none for a dummy


@dataclass(frozen=True)
class BalancedStep:
    """The data of one step on this rank. What only ranks that load data know is None on the others."""

    slots: Slots
    replica: tuple[Slots, ...]  # of each context-parallel rank of this replica where sizes differ; else one for all
    figures: Figures = field(default_factory=dict[str, float])
    microbatches: list[Microbatch] | None = None  # on a stage that loads no data the starts of their sequences
    schedule: DataSchedule | None = None
    reported: NDArray[np.int64] | None = None  # `[dp_size, 4]`, as each data-parallel rank sent them with its lengths
    fingerprint: int = 0  # of plan and tokens, in [0, 2**63): equal on all ranks of a model replica that read data
    new_iterator: bool = False  # some data-parallel rank read it from another iterator than its last step
    number: int = 0
    exposed_seconds: float = 0.0  # waiting when the step began; the rest ran during the step before

    @property
    def num_microbatches(self) -> int:
        """Of this rank; with dynamic context-parallel sizes other ranks may have others."""
        return len(self.slots.num_tokens)

    def to_text(self) -> str:
        """For the ranks of this replica that load no data."""
        return json.dumps([vars(slots) for slots in self.replica])

    @classmethod
    def from_text(cls, text: str, *, cp_rank: int) -> BalancedStep:
        """The step that another rank of the replica made."""
        replica = tuple(Slots(**of_leaf) for of_leaf in json.loads(text))
        return cls(replica[cp_rank % len(replica)], replica)
