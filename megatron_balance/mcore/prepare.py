"""Turns the items that ranks loaded into the micro-batches that they run, for one step.

    items → samples → gather lengths → plan → compare → exchange → pack

On the CPU and over a process group of its own, so that a thread can do it for the next step while this one runs. With
dynamic context parallelism the s DP×CP ranks that share a micro-batch of size s pack it identically, with sequences
padded for s. Ranks that load no data learn of the step by a text; pipeline stages without an iterator get the starts of
sequences.

Invariants: what one rank cannot fetch or split is raised on every rank of the group, as is a plan that cannot be
packed; the plan depends on gathered lengths and flags alone; no step is returned that another rank planned otherwise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.loss_weights import joined, loss_weights
from megatron_balance.mcore.plan_process import PlanProcess
from megatron_balance.mcore.setup.layout import RankCoords
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.planner import DataSchedule, Forest
from megatron_balance.planner.speeds import with_speeds
from megatron_balance.runtime.exchange import reroute_samples
from megatron_balance.runtime.failure import Failure, attempt, check_same_schedule
from megatron_balance.runtime.gather import GatheredLengths, gather_lengths, image_patches
from megatron_balance.samples.packing import check_loss_mask, pack_microbatch, sequence_starts
from megatron_balance.samples.prefix_packing import PrefixTree, check_shareable, pack_shared, tree_starts
from megatron_balance.samples.sample import Samples
from megatron_balance.samples.shared_prefixes import hash_chains
from megatron_balance.samples.unpacking import split_packed, with_cu_seqlens, with_row_lengths
from megatron_balance.topology import Topology

Ints = NDArray[np.int64]
Microbatch = dict[str, Tensor]

NOT_PACKED = (
    "the data has no cu_seqlens: rows of one fixed length, among which nothing can be balanced. Use packed (thd) data, "
    "such as --sft makes; add --balance-unpad where rows are padded at their end; or drop --use-dynamic-batch-size "
    "and --balance-data."
)

DUMMY_TOKENS = 128
"""Tokens of a dummy on each GPU, at least: a few would be a shape of their own to compiled kernels."""

_NO_REPORT = (0, 0, 0)
"""Memory of the device (2), and the time of a step, none of which is known."""


@dataclass(frozen=True)
class MicrobatchSizes:
    """The micro-batches of a rank, in the order in which they run."""

    cp_sizes: list[int]  # context-parallel ranks that share each
    num_tokens: list[int]  # over those ranks, padding and filler included
    sequence_lengths: list[list[int]]  # without padding and filler; none for a dummy
    loss_weights: list[list[float]] | None = None  # of these sequences; None where all tokens count alike
    shared: list[list[int]] | None = None  # tokens that each shares with the one before it; None where none may

    def trees(self) -> list[PrefixTree]:
        """The tree of each micro-batch whose samples share tokens; none where none may."""
        columns = zip(self.sequence_lengths, self.shared or (), self.num_tokens, strict=self.shared is not None)
        return [PrefixTree.of(lengths, shared, num_tokens=num_tokens) for lengths, shared, num_tokens in columns]


@dataclass(frozen=True)
class StepTotals:
    """The samples of a step on all ranks, by which Megatron's log is corrected."""

    microbatches: int  # that hold samples; one that context-parallel ranks share counts once
    tokens: int  # without padding and filler
    squares: int  # of the samples' lengths
    computed: int = 0  # tokens without those that samples share, each of which is computed once
    learned: int = 0  # tokens with a loss, where a weighting counts them


@dataclass(frozen=True)
class BalancedStep:
    """The data of one step on this rank. What only ranks that load data know is None on the others."""

    sizes: MicrobatchSizes
    replica: tuple[MicrobatchSizes, ...]  # of each of its context-parallel ranks where sizes differ; else one for all
    totals: StepTotals
    figures: Mapping[str, float] = field(default_factory=dict[str, float])  # where another rank sent them
    microbatches: list[Microbatch] | None = None  # on a stage that loads no data the starts of their sequences
    schedule: DataSchedule | None = None
    num_tokens: int = 0  # of the micro-batches of all ranks, padding and filler included
    reported: Ints | None = None  # `[dp_size, 5]` of each data-parallel rank
    fingerprint: int = 0  # of plan and tokens, in [0, 2**63): equal on all ranks of a model replica that read data
    number: int = 0
    plan_seconds: float = 0.0
    exchange_seconds: float = 0.0
    exposed_seconds: float = 0.0  # waiting when the step began; the rest ran during the step before

    @property
    def num_microbatches(self) -> int:
        """Of this rank; with dynamic context-parallel sizes other ranks may have others."""
        return len(self.sizes.num_tokens)

    @property
    def new_iterator(self) -> bool:
        """True if some data-parallel rank read it from another iterator than its last step."""
        return self.reported is not None and bool(self.reported[:, 0].any())

    def to_text(self, figures: Mapping[str, float]) -> str:
        """For the ranks of this replica that load no data."""
        replica = [vars(sizes) for sizes in self.replica]
        return json.dumps({"replica": replica, "totals": vars(self.totals), "figures": figures})

    @classmethod
    def from_text(cls, text: str, *, cp_rank: int) -> BalancedStep:
        """The step that another rank of the replica made."""
        content = json.loads(text)
        replica = tuple(MicrobatchSizes(**sizes) for sizes in content["replica"])
        return cls(replica[cp_rank % len(replica)], replica, StepTotals(**content["totals"]), content["figures"])


class StepBuilder:
    """Makes steps on one rank that loads data; on the others it holds what their steps have in common.

    `dp_group` are the ranks that load different samples, over gloo; None where this rank loads none. `report` returns
    by the number of a step what goes to the other ranks with the lengths of its samples.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        dp_group: dist.ProcessGroup | None,
        coords: RankCoords | None = None,
        report: Callable[[int], Sequence[int]] = lambda _: _NO_REPORT,
    ) -> None:
        self.settings, self.topology = settings, settings.topology
        self.cp_rank = 0 if coords is None else coords.cp
        self._plans = PlanProcess(timeout=settings.peer_timeout / 2)
        self._dp_group = dp_group
        # Plans with dynamic context-parallel sizes take no images.
        has_images = settings.costs.model.image_linear or settings.costs.model.image_quadratic
        self._counts_images = bool(has_images) and not self.topology.dynamic_cp
        self._report = report

    @property
    def loads_data(self) -> bool:
        """True if this rank loads and exchanges samples."""
        return self._dp_group is not None

    def build(
        self, items: Sequence[Any], *, number: int = 0, new_iterator: bool = False, evaluates: bool = False
    ) -> BalancedStep:
        """One step, on every rank of the group, of items as `pull` returns them, or a BalanceError on every rank."""
        started = time.perf_counter()
        group, topology, settings = self._dp_group, self.topology, self.settings
        assert group is not None, "this rank loads data"
        weighting = None if evaluates else settings.loss_weighting
        samples = self._split(items, weighting=weighting)
        # Whether the iterator is new, plans that the training process had to make, and what `report` says.
        reports = new_iterator, self._plans.num_fallbacks, *self._report(number)
        announced = {"step of": "evaluation" if evaluates else "training"}
        gathered = gather_lengths(samples, group=group, settings=announced, step=number, reported=reports)
        assert not isinstance(samples, Failure), "every rank has raised it"
        if gathered.schema is None:
            raise BalanceError("The data iterators of all ranks yielded no tokens for this step: check the data set.")
        forest = None if gathered.chains is None else Forest.from_chains(gathered.lengths, gathered.chains)
        plan_started = time.perf_counter()
        limits = settings.eval_limits if evaluates else None
        schedule = self._plan(gathered, forest=forest, settings=replace(settings, limits=limits or settings.limits))
        plan_seconds = time.perf_counter() - plan_started
        digest, lengths = schedule.digest(), schedule.lengths
        check_same_schedule(digest, group=group)
        replica, sample_ids, num_tokens = sizes_of_replica(
            schedule,
            dp_rank=group.rank(),
            topology=topology,
            loss_weights=loss_weights(gathered, weighting=weighting, num_microbatches=len(items) * topology.dp_size),
        )
        computed = int((lengths if forest is None else schedule.computed_lengths).sum())
        if num_tokens > computed:  # on some rank: all of them raise
            check_loss_mask(gathered.schema)
        copies, destinations = schedule.copies(cp_rank=self.cp_rank)
        ids, arrived = reroute_samples(
            samples, sample_ids=copies, destinations=destinations, gathered=gathered, group=group
        )
        index = self.cp_rank if topology.dynamic_cp else 0
        packs = attempt(
            pack,
            replica[index],
            settings=settings,
            samples=[arrived.select(np.searchsorted(ids, microbatch)) for microbatch in sample_ids[index]],
        )
        if forest is not None:  # a single rank finds that hashes were equal by chance
            check_same_schedule(digest, group=group, error=packs.text if isinstance(packs, Failure) else None)
        if isinstance(packs, Failure):
            raise packs.error
        # Context-parallel ranks of a replica run different packs, made from what all of them loaded.
        tokens = [*samples.columns["tokens"]] if len(samples) else []
        if not topology.dynamic_cp:
            tokens = [microbatch["tokens"] for microbatch in packs]
        totals = StepTotals(
            np.unique(schedule.microbatch_of[lengths > 0]).size,
            int(lengths.sum()),
            int((lengths * lengths).sum()),
            computed,
            0 if weighting is None else int(gathered.values[:, -2].sum()),
        )
        return BalancedStep(
            replica[index],
            replica,
            totals,
            microbatches=packs,
            schedule=schedule,
            num_tokens=num_tokens,
            reported=gathered.reported,
            fingerprint=(digest ^ checksum(tokens)) & (2**63 - 1),
            number=number,
            plan_seconds=plan_seconds,
            exchange_seconds=time.perf_counter() - started - plan_seconds,
        )

    def _split(self, items: Sequence[Any], *, weighting: str | None) -> Samples | Failure:
        """The samples of this rank on the CPU, or a failure that names the item."""
        parts: list[Samples] = []
        for index, item in enumerate(items):
            if isinstance(item, Failure):
                ended = BalanceError(f"its data ended after {index} items of this step.")
                return Failure(ended) if isinstance(item.error, StopIteration) else item
            part = attempt(_split_item, item, unpad=self.settings.unpad)
            if isinstance(part, Failure):
                return replace(part, during=f"item {index} of this step")
            parts.append(part)
        return attempt(self._join, parts, weighting=weighting)

    def _join(self, parts: Sequence[Samples], *, weighting: str | None) -> Samples:
        """The samples of these items, with hashes, patches of images and loss weights, where each counts."""
        samples = Samples.joined(parts) if weighting is None else joined(parts, weighting=weighting)
        if self.settings.share_prefixes:
            check_shareable(samples, weighting=self.settings.loss_weighting)
            samples = replace(samples, chains=hash_chains(samples, with_mask=weighting is not None))
        if not self._counts_images:
            return samples
        values = [image_patches(samples), *([] if samples.values is None else [samples.values])]
        return replace(samples, values=np.hstack(values))

    def _plan(self, gathered: GatheredLengths, *, forest: Forest | None, settings: Settings) -> DataSchedule:
        schedule = self._plans.plan(
            gathered.lengths,
            image_patches=gathered.values[:, :2] if self._counts_images else None,
            home_ranks=gathered.home_ranks,
            forest=forest,
            **settings.planning,
        )
        return with_speeds(schedule, settings.speeds) if settings.speeds else schedule


def _split_item(item: Any, *, unpad: int | str | None) -> Samples:
    if not isinstance(item, Mapping):
        raise BalanceError(NOT_PACKED)
    item = with_cu_seqlens({key: value.cpu() if isinstance(value, Tensor) else value for key, value in item.items()})
    if item.get("cu_seqlens") is None:
        if unpad is None:
            raise BalanceError(NOT_PACKED)
        item = with_row_lengths(item, padding=unpad)
    return split_packed(item)


def sizes_of_replica(
    schedule: DataSchedule, *, dp_rank: int, topology: Topology, loss_weights: NDArray[np.float64] | None = None
) -> tuple[tuple[MicrobatchSizes, ...], list[list[Ints]], int]:
    """What each rank that shares micro-batches runs, one for all at one size; their sample ids; tokens of the step."""
    cp_sizes, forest = schedule.cp_size_grid, schedule.forest
    multiples = np.ones_like(cp_sizes)
    for size in topology.dynamic_cp_sizes:
        multiples[cp_sizes == size] = topology.with_cp_size(size).pack_multiple
    tokens = schedule.slot_tokens().reshape(cp_sizes.shape)
    tokens = -(-np.where(tokens == 0, DUMMY_TOKENS * cp_sizes, tokens) // multiples) * multiples
    # In a forest in the order in which each adds to the one before it.
    order = np.arange(schedule.lengths.size) if forest is None else forest.order
    order = order[schedule.lengths[order] > 0]
    slots, owners = schedule.microbatch_of[order], schedule.owner_slots()
    replica: list[MicrobatchSizes] = []
    sample_ids: list[list[Ints]] = []
    width = topology.cp_size if topology.dynamic_cp else 1
    for row in range(dp_rank * width, (dp_rank + 1) * width):
        runs = cp_sizes[row] > 0
        ids = [order[slots == owner] for owner in owners[row][runs]]
        sizes = MicrobatchSizes(
            cp_sizes[row][runs].tolist(),
            tokens[row][runs].tolist(),
            sequence_lengths=_of_samples(schedule.lengths, ids),
            loss_weights=None if loss_weights is None else _of_samples(loss_weights, ids),
            shared=None if forest is None else _of_samples(schedule.lengths - schedule.computed_lengths, ids),
        )
        sample_ids.append(ids)
        replica.append(sizes)
    num_tokens = int((tokens // np.maximum(cp_sizes, 1) if topology.dynamic_cp else tokens).sum())
    return tuple(replica), sample_ids, num_tokens


def _of_samples(values: NDArray[Any], ids: Sequence[Ints]) -> list[list[Any]]:
    return [values[samples].tolist() for samples in ids]


def pack(sizes: MicrobatchSizes, *, settings: Settings, samples: Sequence[Samples] | None = None) -> list[Microbatch]:
    """The micro-batches of a rank, from the samples of each; without samples, the starts of their sequences."""
    packs: list[Microbatch] = []
    trees = sizes.trees()
    for number, (cp_size, num_tokens) in enumerate(zip(sizes.cp_sizes, sizes.num_tokens, strict=True)):
        token_multiple = settings.topology.with_cp_size(cp_size).token_multiple
        shape: Any = {"token_multiple": token_multiple, "cp_size": cp_size, "num_tokens": num_tokens}
        shape["few_shapes"] = settings.few_shapes
        if trees and samples is None:
            packs.append(tree_starts(trees[number]))
        elif trees and samples is not None:
            packs.append(pack_shared(samples[number], tree=trees[number], masks_differ=sizes.loss_weights is None))
        elif samples is None:
            packs.append(sequence_starts(sizes.sequence_lengths[number], **shape))
        else:
            packs.append(pack_microbatch(samples[number], **shape))
    if torch.cuda.is_available():  # from pinned memory a device copies without waiting; torch keeps its blocks
        return [{name: tensor.pin_memory() for name, tensor in packed.items()} for packed in packs]
    return packs


def checksum(tensors: Iterable[Tensor]) -> int:
    """Checksum over the tokens of these tensors, one after another, and their positions in each."""
    total = 0
    for tensor in tensors:
        tokens = tensor.flatten().long()
        total = 31 * total + int(torch.dot(tokens, torch.arange(1, tokens.numel() + 1)))
    return total
