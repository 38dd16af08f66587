"""Turns the samples that ranks loaded into the micro-batches that they run, for one step.

    items → samples → gather lengths → plan → compare → reroute → pack → agree

It happens on the CPU and over a process group of its own, so that a thread can do it for the next step while
this one runs. Ranks meet four times: they gather lengths, compare their plans, exchange samples, and agree that all
have packed theirs. Ranks that exchanged samples by different plans would wait for one another without end.

Invariants: what one rank cannot fetch, split or pack is raised on every rank of the group; the plan depends on
gathered lengths and flags alone; no step is returned that another rank planned otherwise.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

import megatron_balance
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.arguments import BalanceConfig
from megatron_balance.mcore.setup.run_log import RunLog
from megatron_balance.mcore.step.balanced_step import BalancedStep
from megatron_balance.mcore.step.figures import Figures
from megatron_balance.mcore.step.items import ItemSplitter, SampleOrigin
from megatron_balance.mcore.step.packs import checksum, own_slots, pack_slots, prepare_samples
from megatron_balance.mcore.step.plan_process import PlanProcess
from megatron_balance.mcore.step.pull_ahead import Fetched
from megatron_balance.planner import DataSchedule, Images
from megatron_balance.runtime.exchange import HostBuffers
from megatron_balance.runtime.failure import Failure, agreeing_on, attempt, raise_together
from megatron_balance.runtime.gather import (
    INLINE_LENGTHS,
    NUM_REPORTED,
    GatheredLengths,
    gather_sample_lengths,
)
from megatron_balance.samples.padding import sequence_lengths
from megatron_balance.topology import Limits, Topology

NOT_PACKED = (
    "the data has no cu_seqlens: rows of one fixed length, among which nothing can be balanced. Use packed (thd) data, "
    "such as --sft makes; add --balance-unpad where rows are padded at their end; or drop --use-dynamic-batch-size "
    "and --balance-data."
)


def _warn(text: str) -> None:
    RunLog(enabled=True).warn_once(f"rank {dist.get_rank()}: {text}")


class StepPlanner:
    """Makes steps on one rank that loads data; on the others it holds what their steps have in common.

    Args:
        config: the flags.
        topology: the ranks.
        limits: token or sample cap of a micro-batch.
        cost_model: tokens, FLOPs or seconds.
        dp_group: ranks that load different samples and are otherwise equal (no context parallelism); gloo. None where
            this rank loads no data.
        dp_rank: data-parallel rank of this one, where it has no dp_group.
        cp_rank: context-parallel rank of this one.
        origin: which sample of the data set a row is, or None where that is not known.
        ranks_per_node: data-parallel ranks of a node, on which samples stay where costs allow; None for any.
        pin_memory: copy micro-batches to pinned memory, from which transfers to a GPU are asynchronous.
        timeout: of the collectives of `dp_group`; a planning process that takes half that time counts as hanging.
        patch_values: numbers of a patch of the model's vision encoder; 0 where that is not known.

    Attributes:
        report: called with the number of a step, returns what travels to the other data-parallel ranks with the lengths
            of its samples.
    """

    def __init__(
        self,
        config: BalanceConfig,
        *,
        topology: Topology,
        limits: Limits,
        cost_model: CostModel,
        dp_group: dist.ProcessGroup | None,
        dp_rank: int = 0,
        cp_rank: int = 0,
        origin: SampleOrigin | None = None,
        ranks_per_node: int | None = None,
        pin_memory: bool = False,
        timeout: timedelta = timedelta(minutes=10),
        patch_values: int = 0,
    ) -> None:
        self.config = config
        self.topology = topology
        self.limits = limits
        self.cost_model = cost_model
        self.dp_rank = dp_rank if dp_group is None else dp_group.rank()
        self.cp_rank = cp_rank
        self._dp_group = dp_group
        self._splitter = ItemSplitter(unit=config.unit, unpad=config.unpad, origin=origin)
        self.ranks_per_node = ranks_per_node
        self._pin_memory = pin_memory
        # Plans with dynamic context-parallel sizes take no images.
        counts_images = (cost_model.image_linear or cost_model.image_quadratic) and not topology.dynamic_cp
        self._patch_values = patch_values if counts_images else None
        self._buffers = HostBuffers()
        self._plans = PlanProcess(timeout=timeout / 2, warn=_warn)
        self._row_values = INLINE_LENGTHS
        self.report: Callable[[int], Sequence[int]] = lambda number: (0,) * NUM_REPORTED
        # Ranks that were started with different flags or versions would plan differently: they find out here.
        text = f"{megatron_balance.__version__} {config} {topology} {limits} {cost_model}"
        self._fingerprint = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The ranks that load different samples, this one among them."""
        assert self._dp_group is not None, "this rank loads data"
        return self._dp_group

    @property
    def loads_data(self) -> bool:
        """True if this rank loads and exchanges samples."""
        return self._dp_group is not None

    @property
    def leaf(self) -> int:
        """This rank among data- and context-parallel ranks, context-parallel ones innermost."""
        return self.dp_rank * self.topology.cp_size + self.cp_rank

    def make(
        self,
        fetched: Fetched,
        *,
        num_items: int,
        step: int = 0,
        new_iterator: bool = False,
        first_item: int = 0,
    ) -> BalancedStep:
        """One step, on every rank of the group.

        Args:
            fetched: the items of the data loader, or its error.
            num_items: items that were wanted.
            step: counted from 0. One that could not be prepared may be made again.
            new_iterator: the items come from another iterator than those of the last step.
            first_item: of these, counted from the loader's first.

        Raises:
            BalanceError: on every rank of the group.
            AgreedError: the same, on a rank where code raised another error.
        """
        started = time.perf_counter()
        items, failure, samples = fetched.items, fetched.failure, []
        packed = all(isinstance(item, Mapping) and self._splitter.has_lengths(item) for item in items)
        if failure is None and len(items) < num_items:
            ended = f"its data ended after {len(items)} of {num_items} items of this step."
            failure = Failure(BalanceError(ended))
        if failure is None and packed:
            split = self._splitter.split(items, first_item=first_item)
            samples, failure = ([], split) if isinstance(split, Failure) else (split, None)
        with agreeing_on(failure):
            gathered = gather_sample_lengths(
                samples,
                group=self.dp_group,
                fingerprint=self._fingerprint,
                packed=packed,
                step=step,
                new_source=new_iterator,
                problem=None if failure is None else failure.problem,
                row_values=self._row_values,
                reported=self.report(step),
                patch_values=self._patch_values,
            )
        # Every gather is one of all ranks, and fails on all of them: so they keep the same size.
        self._row_values = gathered.next_row_values
        if not packed:
            raise BalanceError(NOT_PACKED)
        if gathered.schema is None:
            raise BalanceError("The data iterators of all ranks yielded no tokens for this step: check the data set.")
        plan_started = time.perf_counter()
        schedule = self._plan(gathered)
        planned = time.perf_counter()
        raise_together(
            None,
            group=self.dp_group,
            what="the plans of all ranks (compare)",
            digest=schedule.digest(),
        )
        exchange = prepare_samples(
            samples,
            schedule=schedule,
            gathered=gathered,
            dp_group=self.dp_group,
            cp_rank=self.cp_rank,
            buffers=self._buffers,
        )
        mine = exchange.run(group=self.dp_group)
        own = own_slots(
            mine,
            schedule=schedule,
            gathered=gathered,
            dp_rank=self.dp_group.rank(),
            cp_rank=self.cp_rank,
            shape_bucket=self.config.shape_bucket,
        )
        packs = attempt(pack_slots, own, topology=self.topology, schema=gathered.schema, pin_memory=self._pin_memory)
        raise_together(
            replace(packs, during="packing this step's samples") if isinstance(packs, Failure) else None,
            group=self.dp_group,
            what="that all ranks have packed their micro-batches",
        )
        assert not isinstance(packs, Failure), "raised"
        assert gathered.reported is not None, "each rank sends some"
        plan_seconds, ended = planned - plan_started, time.perf_counter()
        exchange_seconds = ended - planned + plan_started - started
        figures = Figures.of_schedule(
            schedule,
            step_tokens=own.step_tokens,
            plan_seconds=plan_seconds,
            exchange_seconds=exchange_seconds,
            seconds=gathered.reported[:, -1] / 1e9,
        )
        return BalancedStep(
            num_microbatches=len(own.slots),
            microbatch_tokens=own.num_tokens,
            sequence_lengths=[sequence_lengths(slot) for slot in own.slots],
            step_tokens=own.step_tokens,
            microbatches=packs,
            schedule=schedule,
            # Leaves of a replica run different packs, made from what all of them loaded.
            fingerprint=(schedule.digest() ^ checksum(samples if own.leaves else packs)) & (2**63 - 1),
            cp_sizes=own.cp_sizes if own.leaves else None,
            leaves=own.leaves,
            reported=gathered.reported,
            plan_seconds=plan_seconds,
            exchange_seconds=exchange_seconds,
            number=step,
            figures=figures,
            new_iterator=gathered.new_source,
        )

    def _plan(self, gathered: GatheredLengths) -> DataSchedule:
        whole = len(gathered.segment_lengths) == len(gathered.lengths)
        return self._plans.plan(
            num_samples=len(gathered.lengths),
            lengths=gathered.segment_lengths,
            num_segments=None if whole else gathered.num_segments,
            image_patches=None if gathered.image_patches is None else Images(gathered.image_patches),
            cost_model=self.cost_model,
            topology=self.topology,
            limits=self.limits,
            objective=self.config.objective,
            algorithm=self.config.algorithm,
            home_ranks=gathered.home_ranks,
            move_samples=self.config.balance_data,
            ranks_per_node=None if self.topology.dynamic_cp else self.ranks_per_node,
        )
