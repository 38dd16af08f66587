"""Turns the items that ranks loaded into the micro-batches that they run, for one step.

    items → samples → gather lengths → plan → compare → exchange → pack

On the CPU and over a process group of its own, so that a thread can do it for the next step while this one runs.

Invariants: what one rank cannot fetch or split is raised on every rank of the group, as is a plan that cannot be
packed; the plan depends on gathered lengths and flags alone; no step is returned that another rank planned otherwise.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.settings import Settings
from megatron_balance.mcore.step.figures import figures_of
from megatron_balance.mcore.step.loss_weights import joined, loss_weights
from megatron_balance.mcore.step.packs import BalancedStep, StepTotals, checksum, pack, slots_of_replica
from megatron_balance.mcore.step.plan_process import PlanProcess
from megatron_balance.planner import DataSchedule, Images
from megatron_balance.runtime.exchange import reroute_columns
from megatron_balance.runtime.failure import Failure, attempt, check_same_schedule
from megatron_balance.runtime.gather import (
    INLINE_LENGTHS,
    NUM_REPORTED,
    GatheredLengths,
    Header,
    gather_sample_lengths,
)
from megatron_balance.runtime.log import warn_once
from megatron_balance.samples.packing import check_loss_mask
from megatron_balance.samples.sample import Samples
from megatron_balance.samples.unpacking import split_packed, with_cu_seqlens, with_row_lengths


def warn_of(text: str) -> None:
    """Print a warning of this rank."""
    warn_once(text, every_rank=True)


_NO_REPORT = (0,) * (NUM_REPORTED - 2)

NOT_PACKED = (
    "the data has no cu_seqlens: rows of one fixed length, among which nothing can be balanced. Use packed (thd) data, "
    "such as --sft makes; add --balance-unpad where rows are padded at their end; or drop --use-dynamic-batch-size "
    "and --balance-data."
)


@dataclass(frozen=True)
class Fetched:
    """Items of an iterator; fewer than wanted where it raised an error in place of the next, as it does at its end."""

    items: list[Any]
    failure: Failure | None = None

    @property
    def ended(self) -> bool:
        """True if the iterator has no more items."""
        return self.failure is not None and isinstance(self.failure.error, StopIteration)


class StepPlanner:
    """Makes steps on one rank that loads data; on the others it holds what their steps have in common.

    `dp_group` are the ranks that load different samples, over gloo; None where this rank, `dp_rank`, loads none.
    Samples stay on the `ranks_per_node` data-parallel ranks of a node where costs allow. `report` says by the number of
    a step what goes to the other ranks with the lengths of its samples. A planner of evaluation takes the group and
    `plans` of that of training, and never works at the same time.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        dp_group: dist.ProcessGroup | None,
        dp_rank: int = 0,
        cp_rank: int = 0,
        ranks_per_node: int | None = None,
        evaluation_plans: PlanProcess | None = None,
        report: Callable[[int], Sequence[int]] = lambda _: _NO_REPORT,
    ) -> None:
        self.settings = settings
        self.topology = topology = settings.topology
        evaluates = evaluation_plans is not None
        self.limits = (evaluates and settings.eval_limits) or settings.limits
        self.cost_model = cost_model = settings.costs.model
        self.dp_rank = dp_rank if dp_group is None else dp_group.rank()
        self.cp_rank = cp_rank
        # From pinned memory transfers to a GPU are asynchronous.
        self.pin_memory = torch.cuda.is_available()
        self._dp_group = dp_group
        self._ranks_per_node = None if topology.dynamic_cp else ranks_per_node
        # Plans with dynamic context-parallel sizes take no images.
        has_images = cost_model.image_linear or cost_model.image_quadratic
        self._counts_images = bool(has_images) and not topology.dynamic_cp
        self.plans = evaluation_plans or PlanProcess(timeout=settings.peer_timeout / 2, warn=warn_of)
        self._weighting = None if evaluates else settings.loss_weighting
        self._row_values = INLINE_LENGTHS
        self._report = report
        self._compared = {"step of": "evaluation" if evaluates else "training"}

    @property
    def loads_data(self) -> bool:
        """True if this rank loads and exchanges samples."""
        return self._dp_group is not None

    def make(self, fetched: Fetched, *, num_items: int, number: int = 0, new_iterator: bool = False) -> BalancedStep:
        """One step, on every rank of the group, of the items that were fetched where `num_items` were wanted.

        A BalanceError is raised on every rank of the group; its cause is the error of other code on this rank.
        """
        started = time.perf_counter()
        group, dynamic = self._dp_group, self.topology.dynamic_cp
        assert group is not None, "this rank loads data"
        samples = self._samples(fetched, num_items=num_items)
        failure = samples if isinstance(samples, Failure) else None
        samples = Samples.of([]) if isinstance(samples, Failure) else samples
        try:
            gathered = gather_sample_lengths(
                samples,
                group=group,
                error=None if failure is None else failure.text,
                counts_images=self._counts_images,
                header=Header(
                    self._compared,
                    number,
                    (new_iterator, self.plans.num_fallbacks, *self._report(number)),
                    self._row_values,
                ),
            )
        except BalanceError as agreed:
            raise agreed from failure.error if failure else agreed.__cause__
        # Every gather is one of all ranks, and fails on all of them: so they keep the same size.
        self._row_values = gathered.next_row_values
        if gathered.schema is None:
            raise BalanceError("The data iterators of all ranks yielded no tokens for this step: check the data set.")
        plan_started = time.perf_counter()
        schedule = self._plan(gathered)
        planned = time.perf_counter()
        digest = schedule.digest()
        check_same_schedule(digest, group=group)
        replica, slot_ids, step_tokens = slots_of_replica(
            schedule,
            dp_rank=self.dp_rank,
            shape_bucket=self.settings.shape_bucket,
            loss_weights=loss_weights(
                gathered, weighting=self._weighting, num_microbatches=num_items * self.topology.dp_size
            ),
        )
        if step_tokens > schedule.lengths.sum():  # on some rank: all of them raise
            check_loss_mask(gathered.schema)
        sample_ids, destinations = schedule.copies(cp_rank=self.cp_rank)
        ids, mine = reroute_columns(
            samples,
            sample_ids=sample_ids,
            destinations=destinations,
            gathered=gathered,
            group=group,
        )
        leaf = self.cp_rank if dynamic else 0
        packs = pack(
            replica[leaf],
            topology=self.topology,
            few_shapes=self.settings.few_shapes,
            pin_memory=self.pin_memory,
            samples=[mine.select(np.searchsorted(ids, of_slot)) for of_slot in slot_ids[leaf]],
            schema=gathered.schema,
        )
        # Leaves of a replica run different packs, made from what all of them loaded.
        parts = [pack["tokens"] for pack in packs]
        if dynamic:
            parts = [torch.cat([*samples.columns["tokens"]])] if len(samples) else []
        learned = 0 if gathered.sample_values is None else int(gathered.sample_values[:, 0].sum())
        figures = figures_of(schedule, step_tokens=step_tokens, seconds=gathered.reported[:, -1] / 1e9)
        figures["fallback_plans"] = float(gathered.reported[:, 1].sum())
        figures["plan_seconds"] = planned - plan_started
        figures["exchange_seconds"] = time.perf_counter() - planned + plan_started - started
        return BalancedStep(
            replica[leaf],
            replica,
            StepTotals.of_schedule(schedule, learned=learned),
            figures,
            microbatches=packs,
            schedule=schedule,
            reported=gathered.reported[:, 2:],
            fingerprint=(digest ^ checksum(parts)) & (2**63 - 1),
            new_iterator=bool(gathered.reported[:, 0].any()),
            number=number,
        )

    def _samples(self, fetched: Fetched, *, num_items: int) -> Samples | Failure:
        """Those of this rank, or why it has none."""
        if fetched.ended:
            ended = f"its data ended after {len(fetched.items)} of {num_items} items of this step."
            return Failure(BalanceError(ended))
        return fetched.failure or split_items(fetched.items, unpad=self.settings.unpad, weighting=self._weighting)

    def _plan(self, gathered: GatheredLengths) -> DataSchedule:
        return self.plans.plan(
            num_samples=len(gathered.lengths),
            lengths=gathered.lengths,
            image_patches=None if gathered.image_patches is None else Images(gathered.image_patches),
            cost_model=self.cost_model,
            topology=self.topology,
            limits=self.limits,
            objective=self.settings.objective,
            algorithm=self.settings.algorithm,
            home_ranks=gathered.home_ranks,
            move_samples=self.settings.balance_data,
            ranks_per_node=self._ranks_per_node,
        )


def split_items(items: Sequence[Any], *, unpad: int | str | None, weighting: str | None) -> Samples | Failure:
    """The samples of a step's items on the CPU, with their `loss_values`; or a failure that names the item."""
    parts: list[Samples] = []
    for index, item in enumerate(items):
        part = attempt(_split, item, unpad=unpad)
        if isinstance(part, Failure):
            return replace(part, during=f"item {index} of this step")
        parts.append(part)
    return attempt(Samples.joined if weighting is None else functools.partial(joined, weighting=weighting), parts)


def _split(item: Any, *, unpad: int | str | None) -> Samples:
    if not isinstance(item, Mapping):
        raise BalanceError(NOT_PACKED)
    item = with_cu_seqlens({key: value.cpu() if isinstance(value, Tensor) else value for key, value in item.items()})
    if item.get("cu_seqlens") is None:
        if unpad is None:
            raise BalanceError(NOT_PACKED)
        item = with_row_lengths(item, padding=unpad)
    return split_packed(item)
