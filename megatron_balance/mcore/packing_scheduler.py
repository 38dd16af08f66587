"""Our plans as packing schedulers of Megatron, where it has a registry of them (main and dev, 0.20).

    config.sequence_packing_scheduler = "megatron_balance"     # then Megatron's wrap_data_iterator chooses it
    pretrain_gpt.py … --dynamic-context-parallel --max-seqlen-per-dp-cp-rank N --balance-data

Megatron's schedulers fetch, gather lengths, ask `get_groups_and_subsamples` for a plan, move samples and pack them.
Ours are subclasses that override this method; others, such as verl, call the method themselves. One is added beside
`DpBalancedScheduler`. The other takes the place of dev's `DefaultDynamicCPScheduler`, under its name, since dev accepts
no other with dynamic context parallelism; without `--balance-data` it returns Megatron's own plan.

A plan holds a list of sample ids for every rank in every micro-batch. Ranks with the same list share it by context
parallelism. Executors rely on:

    every sample    is in the lists of one group of ranks, in one micro-batch
    groups          ranks with the same list are neighbours and a power of two, or all ranks; a group starts at a
                    multiple of its size, and all its ranks have the list in the same order
    no dummies      every rank has a sample in every micro-batch, and their number is a multiple of microbatch_multiple
    cap             a rank of a group holds at most the cap; a sample that is longer on all ranks runs alone

A batch with too few samples for that, or under DP×CP that is no power of two with one too long for half of the ranks,
gets Megatron's own plan.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.settings import costs_of_args, topology_of
from megatron_balance.planner import DataSchedule, build_data_schedule
from megatron_balance.topology import Limits, Topology

NAME = "megatron_balance"
"""The value of `sequence_packing_scheduler` that chooses the balanced schedule."""

REPLACED = "default_dynamic_cp"
"""The name in `scheduler_map` that `--dynamic-context-parallel` chooses."""

SEAM = "megatron.core.datasets.data_schedule"
_AS_OLD = "megatron.core.datasets.data_schedule_utils"  # as scheduler_map

RankLists = list[list[list[int]]]
"""`[num_microbatches][dp_size * cp_size]` lists of sample ids, of ranks `dp_rank * cp_size + cp_rank`."""


def scheduler_class(base: type[Any], *, dynamic_cp: bool = False) -> type[Any]:
    """Our scheduler on top of Megatron's `DpBalancedScheduler`, or of its `DefaultDynamicCPScheduler`."""

    class PackingScheduler(base):
        """Plans one global batch; Megatron creates one for every step, and runs it by its own `run`."""

        @functools.wraps(base.__init__)
        def __init__(self, *positional: Any, **keywords: Any) -> None:
            super().__init__(*positional, **keywords)
            self.topology = Topology(
                self.dp_size,
                cp_size=self.cp_size,
                microbatch_multiple=self.microbatch_group_size_per_vp_stage or 1,
                dynamic_cp=dynamic_cp,
            )

        def run(
            self, data_iterator: Any, num_microbatches: int, dp_group: Any, tp_group: Any, pp_group: Any, *rest: Any
        ) -> Any:
            self.topology = replace(self.topology, pp_size=pp_group.size())
            if dynamic_cp:
                *_, config = rest
                chunks = config.virtual_pipeline_model_parallel_size or 1
                experts = getattr(config, "expert_model_parallel_size", 1)
                self.topology = replace(self.topology, vpp_size=chunks, ep_size=experts)
            return super().run(data_iterator, num_microbatches, dp_group, tp_group, pp_group, *rest)

        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> RankLists:
            cost_model = _cost_model(self.topology)
            if cost_model is None:
                return super().get_groups_and_subsamples(sample_id_seqlens)
            lists = plan_rank_lists(
                sample_id_seqlens,
                cost_model=cost_model,
                topology=self.topology,
                max_tokens_per_gpu=self.max_seqlen_per_dp_cp_rank,
                min_cp_size=self.min_cp_size if dynamic_cp else self.cp_size,
            )
            if lists is None:
                warnings.warn(f"{NAME}: samples are too few or too long: Megatron plans this batch.", stacklevel=2)
                return super().get_groups_and_subsamples(sample_id_seqlens)
            most = max((len(ids) for of_ranks in lists for ids in of_ranks), default=0)
            allowed = getattr(self, "max_num_seqs", None)
            if allowed is not None and most > allowed:
                raise BalanceError(
                    f"A micro-batch holds {most} samples and --thd-max-packed-sequences allows {allowed}, which {NAME} "
                    f"does not plan for: raise it, or {'drop --balance-data' if dynamic_cp else 'choose dp_balanced'}."
                )
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


class Registration:
    """Entries in Megatron's `scheduler_map`, and in its enumeration of their names where it has one."""

    def __init__(self, module: Any, entries: dict[Any, Any], *, names: Any) -> None:
        self._module, self._before = module, _registered(module)
        module.scheduler_map.update(entries)
        if names is not None:
            module.PackingSchedulerEnum = names
        self._ours = _registered(module)

    def undo(self) -> None:
        """Restore Megatron.

        Raises:
            BalanceError: someone else has changed the map or the enumeration since; nothing is changed then.
        """
        if _registered(self._module) != self._ours:
            raise BalanceError(f"The schedulers of {SEAM} were replaced after {NAME} was added: undo that first.")
        schedulers, names = self._before
        self._module.scheduler_map.clear()
        self._module.scheduler_map.update(schedulers)
        if names is not None:
            self._module.PackingSchedulerEnum = names


def _registered(module: Any) -> tuple[dict[Any, Any], Any]:
    return dict(module.scheduler_map), getattr(module, "PackingSchedulerEnum", None)


def register() -> Registration | None:
    """Add the schedulers where this Megatron has a `scheduler_map` of a known form; None where it has none.

    Main looks a name up in an enumeration and its member in the map; dev keys the map by names. Training with the
    balance flags does not need it: an unknown form is left unchanged.
    """
    module = importlib.import_module(SEAM) if importlib.util.find_spec(_AS_OLD) is not None else None
    schedulers = getattr(module, "scheduler_map", None)
    if not isinstance(schedulers, dict):
        return None
    base, names = getattr(module, "DpBalancedScheduler", None), getattr(module, "PackingSchedulerEnum", None)
    entries: dict[Any, Any] = {}
    larger: Any = None
    if base is not None and names is None and all(isinstance(key, str) for key in schedulers):
        entries[NAME] = scheduler_class(base)
    elif base is not None and isinstance(names, enum.EnumMeta) and all(member in schedulers for member in list(names)):
        # An enumeration cannot grow: a larger one replaces it. Members of the old one stay keys of the map.
        members: list[Any] = list(names)
        values = {member.name: member.value for member in members}
        larger = enum.Enum(names.__name__, {**values, NAME.upper(): NAME})
        entries = {larger[member.name]: schedulers[member] for member in members}
        entries[larger[NAME.upper()]] = scheduler_class(base)
    if isinstance(stock := schedulers.get(REPLACED), type):
        entries[REPLACED] = scheduler_class(stock, dynamic_cp=True)
    return Registration(module, entries, names=larger) if entries else None


def _cost_model(topology: Topology) -> CostModel | None:
    """FLOPs, or the seconds of `--balance-cost`; tokens without Megatron's arguments, which all ranks have or none.

    With dynamic context-parallel sizes what ranks receive counts too, and without `--balance-data` there are no costs.
    """
    try:
        from megatron.training.global_vars import get_args

        args: Any = get_args()
    except (ModuleNotFoundError, AssertionError):  # the second says that there are none
        args = None
    if topology.dynamic_cp:
        if not getattr(args, "balance_data", False):
            return None
        topology = replace(topology_of(vars(args)), dynamic_cp=True)
    elif args is None:
        return CostModel.tokens()
    else:
        topology = replace(topology, ep_size=args.expert_model_parallel_size)
    return costs_of_args(args, topology=topology, balance_by_flops=True).model
