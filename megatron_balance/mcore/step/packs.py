"""The data of one step on one rank: the samples that it runs, packed into micro-batches.

A *leaf* is one context-parallel rank of one data-parallel rank: `dp_rank * cp_size + cp_rank`. With dynamic context
parallelism the s leaves that share a micro-batch of size s pack it identically, with sequences padded for s.

Ranks that load no data learn of the step by a text. Pipeline stages without an iterator get the starts of sequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.mcore.setup.settings import filled_tokens
from megatron_balance.mcore.step.figures import Figures
from megatron_balance.planner import DataSchedule
from megatron_balance.samples.packing import pack_microbatch, sequence_starts
from megatron_balance.samples.sample import Samples, SampleSchema, aligned
from megatron_balance.topology import Topology

Microbatch = dict[str, Tensor]


@dataclass(frozen=True)
class Slots:
    """The micro-batches of a rank, in the order in which they run."""

    cp_sizes: list[int]  # context-parallel ranks that share each
    num_tokens: list[int]  # over those ranks, padding and filler included
    sequence_lengths: list[list[int]]  # without padding and filler; none for a dummy
    loss_weights: list[list[float]] | None = None  # of these sequences; None where all tokens count alike


@dataclass(frozen=True)
class StepTotals:
    """The samples of a step on all ranks, by which Megatron's log is corrected."""

    microbatches: int  # that hold samples; one that context-parallel ranks share counts once
    tokens: int  # without padding and filler
    squares: int  # of the samples' lengths
    learned: int = 0  # tokens with a loss, where a weighting counts them

    @classmethod
    def of_schedule(cls, schedule: DataSchedule, *, learned: int = 0) -> StepTotals:
        """Those of a plan."""
        lengths = schedule.lengths
        microbatches = np.unique(schedule.microbatch_of[lengths > 0]).size
        return cls(microbatches, int(lengths.sum()), int((lengths * lengths).sum()), learned)


@dataclass(frozen=True)
class BalancedStep:
    """The data of one step on this rank. What only ranks that load data know is None on the others."""

    slots: Slots
    replica: tuple[Slots, ...]  # of each context-parallel rank of this replica where sizes differ; else one for all
    totals: StepTotals
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
        replica = [vars(slots) for slots in self.replica]
        return json.dumps({"replica": replica, "totals": vars(self.totals), "figures": self.figures})

    @classmethod
    def from_text(cls, text: str, *, cp_rank: int) -> BalancedStep:
        """The step that another rank of the replica made."""
        made = json.loads(text)
        replica = tuple(Slots(**of_leaf) for of_leaf in made["replica"])
        return cls(replica[cp_rank % len(replica)], replica, StepTotals(**made["totals"]), made["figures"])


def slots_of_replica(
    schedule: DataSchedule, *, dp_rank: int, shape_bucket: int, loss_weights: NDArray[np.float64] | None = None
) -> tuple[tuple[Slots, ...], list[list[NDArray[np.int64]]], int]:
    """What each leaf of a data-parallel rank runs, one for all where sizes do not differ; tokens of the whole step.

    Between the two the sample ids of each leaf's slots.
    """
    sizes, dynamic = schedule.cp_size_grid, schedule.topology.dynamic_cp
    tokens = schedule.slot_tokens().reshape(sizes.shape)
    for size in np.unique(sizes[sizes > 0]).tolist():
        here, topology = sizes == size, schedule.topology.with_cp_size(size)
        tokens[here] = filled_tokens(tokens[here], topology=topology, limits=schedule.limits, shape_bucket=shape_bucket)
    tokens[sizes == 0] = 0
    width = schedule.topology.cp_size if dynamic else 1
    leaves = range(dp_rank * width, (dp_rank + 1) * width)
    ids, places = schedule.sample_ids(), schedule.owner_slots()
    counts = np.bincount(schedule.microbatch_of, minlength=sizes.size)
    stops = np.cumsum(counts)
    of_leaves = [
        [ids[stops[place] - counts[place] : stops[place]] for place in places[leaf][sizes[leaf] > 0]] for leaf in leaves
    ]
    replica = tuple(
        Slots(
            sizes[leaf][sizes[leaf] > 0].tolist(),
            tokens[leaf][sizes[leaf] > 0].tolist(),
            [[length for length in schedule.lengths[of_slot].tolist() if length] for of_slot in of_leaf],
            None
            if loss_weights is None
            else [loss_weights[of_slot[schedule.lengths[of_slot] > 0]].tolist() for of_slot in of_leaf],
        )
        for leaf, of_leaf in zip(leaves, of_leaves, strict=True)
    )
    return replica, of_leaves, int((tokens // np.maximum(sizes, 1) if dynamic else tokens).sum())


def pack(
    slots: Slots,
    *,
    topology: Topology,
    few_shapes: bool,
    pin_memory: bool,
    samples: Sequence[Samples] | None = None,
    schema: SampleSchema | None = None,
) -> list[Microbatch]:
    """The micro-batches of a leaf, from the samples of each; without samples, the starts of their sequences."""
    packs: list[Microbatch] = []
    multiples = {cp_size: topology.with_cp_size(cp_size).token_multiple for cp_size in {*slots.cp_sizes}}
    for slot, (cp_size, num_tokens) in enumerate(zip(slots.cp_sizes, slots.num_tokens, strict=True)):
        sizes: Any = {"token_multiple": multiples[cp_size], "cp_size": cp_size, "num_tokens": num_tokens}
        sizes["few_shapes"] = few_shapes
        if samples is None:
            packs.append(sequence_starts(slots.sequence_lengths[slot], **sizes))
        else:
            packs.append(pack_microbatch(samples[slot], schema=schema, **sizes))
    return pinned(packs) if pin_memory else packs


def pinned(packs: Sequence[Microbatch]) -> list[Microbatch]:
    """The packs in one block of pinned memory: torch keeps blocks, and a new one may make the device wait."""
    sizes = [aligned(tensor.nbytes) for pack in packs for tensor in pack.values()]
    parts = iter(torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True).split(sizes))

    def placed(tensor: Tensor) -> Tensor:
        return next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return [{name: placed(tensor) for name, tensor in pack.items()} for pack in packs]


def checksum(parts: Iterable[Tensor]) -> int:
    """Checksum over the tokens of these parts, and their places."""
    total = 0
    for part in parts:
        tokens = part.flatten().long()
        total = 31 * total + int(torch.dot(tokens, torch.arange(1, tokens.numel() + 1)))
    return total
