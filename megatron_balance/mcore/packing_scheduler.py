"""Our plans in Megatron's packing schedulers, where it has a registry of them (main and dev, 0.20).

    pretrain_gpt.py … --dynamic-context-parallel --max-seqlen-per-dp-cp-rank N --balance-data

Megatron's schedulers fetch, gather lengths, ask `get_groups_and_subsamples` for a plan, move samples and pack them. A
subclass that makes the plan takes the place of each in the registry, under its name, since configurations accept no
other. Without `--balance-data` it returns Megatron's own plan.

A plan holds a list of sample ids for every rank in every micro-batch. Ranks with the same list share it by context
parallelism. Executors rely on:

    every sample    is in the lists of one group of ranks, in one micro-batch
    groups          ranks with the same list are neighbours and a power of two, or all ranks; a group starts at a
                    multiple of its size, and all its ranks have the list in the same order
    no dummies      every rank has a sample in every micro-batch, and their number is a multiple of microbatch_multiple
    cap             a rank of a group holds at most the cap; a sample that is longer on all ranks runs alone

A batch with too few samples for that, with more in a micro-batch than `--thd-max-packed-sequences`, or under DP×CP that
is no power of two with one too long for half of the ranks, gets Megatron's own plan.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.hooking import Patches
from megatron_balance.mcore.setup.settings import costs_of_args, topology_of
from megatron_balance.planner import DataSchedule, build_data_schedule
from megatron_balance.topology import Limits, Topology

SEAM = "megatron.core.datasets.data_schedule"
DYNAMIC_CP = {"dp_balanced": False, "default_dynamic_cp": True}
"""Names in the registry whose plans are ours: whether a micro-batch has a context-parallel size of its own."""

RankLists = list[list[list[int]]]
"""`[num_microbatches][dp_size * cp_size]` lists of sample ids, of ranks `dp_rank * cp_size + cp_rank`."""


def scheduler_class(base: type[Any], *, dynamic_cp: bool = False) -> type[Any]:
    """Our scheduler on top of Megatron's `DpBalancedScheduler`, or of its `DefaultDynamicCPScheduler`."""

    class PackingScheduler(base):
        """Plans one global batch; Megatron creates one for every step, and runs it by its own `run`."""

        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> RankLists:
            args = _args()
            if not getattr(args, "balance_data", False):
                return super().get_groups_and_subsamples(sample_id_seqlens)
            # Lengths come padded.
            topology = replace(
                topology_of(vars(args)), dynamic_cp=dynamic_cp, sequence_parallel=False, token_alignment=1
            )
            lists = plan_rank_lists(
                sample_id_seqlens,
                cost_model=costs_of_args(args, topology=topology, balance_by_flops=True).model,
                topology=topology,
                max_tokens_per_gpu=self.max_seqlen_per_dp_cp_rank,
                min_cp_size=self.min_cp_size if dynamic_cp else self.cp_size,
            )
            most = getattr(self, "max_num_seqs", None)
            if lists is None or (most is not None and max(map(len, chain(*lists)), default=0) > most):
                warnings.warn(
                    "megatron_balance: samples are too few, too long or too many for a micro-batch: Megatron plans "
                    "this batch.",
                    stacklevel=2,
                )
                return super().get_groups_and_subsamples(sample_id_seqlens)
            return lists

    return PackingScheduler


def plan_rank_lists(
    sample_id_seqlens: Sequence[tuple[int, int]],
    *,
    cost_model: CostModel,
    topology: Topology,
    max_tokens_per_gpu: int,
    min_cp_size: int,
) -> RankLists | None:
    """Plans one global batch of pairs of id and length, padded tokens; None where no plan keeps to the contract.

    `min_cp_size` ranks at least share a micro-batch; without dynamic context parallelism `cp_size` do.
    """
    num_ranks, limits = topology.num_leaves, Limits(max_tokens_per_gpu)
    if topology.dynamic_cp:
        if num_ranks % min_cp_size or min_cp_size & (min_cp_size - 1):
            return None
        # Blocks of `min_cp_size` ranks are leaves, with the sizes for which every rank has a group in executors.
        uneven = num_ranks & (num_ranks - 1)
        most = max((1 << num_ranks.bit_length() - 2) // min_cp_size, 1) if uneven else None
        topology = replace(topology, dp_size=num_ranks // min_cp_size, cp_size=1, max_cp_size=most)
        # The cost of a sample on blocks of m ranks, times m: c blocks receive `cp_exchange*(c*m - 1)` a token.
        cost_model = replace(cost_model.at_cp_size(min_cp_size), cp_exchange=cost_model.cp_exchange * min_cp_size)
        limits = Limits(max_tokens_per_gpu * min_cp_size)
        largest = min_cp_size * topology.dynamic_cp_sizes[-1]
        if largest < num_ranks and any(length > max_tokens_per_gpu * largest for _, length in sample_id_seqlens):
            return None
    slots: RankLists = []
    for objective in ("auto", "microbatch"):
        schedule = build_data_schedule(
            [int(length) for _, length in sample_id_seqlens],
            cost_model=cost_model,
            topology=topology,
            limits=limits,
            objective=objective,
        )
        slots = _filled(schedule)
        if all(map(all, slots)):
            break  # else rows of all ranks, which have few empty places, are filled
    lists: RankLists = []
    for of_leaves in slots:
        if not all(of_leaves):
            everyone = sorted({sample for samples in of_leaves for sample in samples})
            if not everyone or not topology.dynamic_cp:
                return None
            of_leaves = [everyone] * len(of_leaves)
        lists.append(
            [[sample_id_seqlens[sample][0] for sample in ids] for ids in of_leaves for _ in range(min_cp_size)]
        )
    return lists


def _filled(schedule: DataSchedule) -> RankLists:
    """Slots of the plan, with single samples in place of dummies as far as there are any.

    The shortest samples that share a micro-batch, of the same leaf if it has one, so that its work stays the same.
    """
    multiple, num_leaves = schedule.topology.microbatch_multiple, len(schedule.cp_size_grid)
    # Leaves of a group have the same list.
    held = [list[int]() for _ in range(schedule.cp_size_grid.size)]
    places: list[list[int]] = schedule.places().tolist()
    slots: RankLists = [[held[place] for place in of_slot] for of_slot in zip(*places, strict=True)]
    slots += [[list[int]() for _ in range(num_leaves)] for _ in range(-len(slots) % multiple)]
    home: list[int] = schedule.slot_of.tolist()
    for sample, place in enumerate(home):
        held[place].append(sample)
    order: list[int] = np.argsort(schedule.lengths, kind="stable").tolist()
    smallest = schedule.topology.at_cp_size(schedule.topology.dynamic_cp_sizes[0])
    fits = smallest.padded_seq_len(schedule.lengths) <= (schedule.limits.max_tokens_per_microbatch(smallest) or 0)
    short = [sample for sample in order if fits[sample]]

    def donors(samples: Iterable[int]) -> Iterator[int]:
        return (sample for sample in samples if sample in held[home[sample]] and len(held[home[sample]]) > 1)

    of_leaves: list[list[int]] = [[] for _ in range(num_leaves)]
    for sample in short:
        if schedule.cp_size_grid.reshape(-1)[home[sample]] == smallest.cp_size:
            of_leaves[home[sample] // schedule.num_microbatches].append(sample)
    any_donors, own_donors = donors(short), [donors(samples) for samples in of_leaves]
    for slot in slots:
        for leaf, ids in enumerate(slot):
            for sample in islice(chain(own_donors[leaf], any_donors), 0 if ids else 1):
                held[home[sample]].remove(sample)
                slot[leaf] = [sample]
    return slots


def register() -> Patches | None:
    """Put our schedulers in the place of those of Megatron's `scheduler_map`; None where it has none of these names.

    Main keys the map by members of an enumeration, dev by their names; both ask the module for it in every step.
    """
    module = importlib.import_module(SEAM)
    stock = getattr(module, "scheduler_map", None) or {}
    names = {key: getattr(key, "value", key) for key in stock}
    ours = {
        key: scheduler_class(stock[key], dynamic_cp=DYNAMIC_CP[name])
        for key, name in names.items()
        if name in DYNAMIC_CP
    }
    return Patches([(module, "scheduler_map", stock, stock | ours)]) if ours else None


def _args() -> Any:
    """Megatron's arguments; None in a loop without them, on every rank."""
    try:
        from megatron.training.global_vars import get_args

        return get_args()
    except (ModuleNotFoundError, AssertionError):  # the second says that there are none
        return None
