"""Our plans as packing schedulers of Megatron, where it has a registry of them (main and dev, 0.20).

    config.sequence_packing_scheduler = "megatron_balance"     # then Megatron's wrap_data_iterator chooses it
    pretrain_gpt.py … --dynamic-context-parallel --max-seqlen-per-dp-cp-rank N --balance-data

Megatron's schedulers fetch, gather lengths, ask `get_groups_and_subsamples` for a plan, move samples and pack them.
Ours are subclasses that override this method; others, such as verl, call the method themselves. One is added beside
`DpBalancedScheduler`. The other takes the place of dev's `DefaultDynamicCPScheduler`, under its name, since dev accepts
no other with dynamic context parallelism; without `--balance-data` it returns Megatron's own plan.

Invariants of a plan at one size: every sample once; every rank has a sample in every micro-batch; context-parallel
ranks of a data-parallel rank have the same samples; a micro-batch of several samples keeps to
`max_seqlen_per_dp_cp_rank` tokens a GPU and to `max_num_seqs`. `rank_lists.py` has the contract of the other.
`undo` restores Megatron.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.rank_lists import plan_rank_lists
from megatron_balance.mcore.setup.settings import costs_of_args, topology_of
from megatron_balance.planner import build_data_schedule
from megatron_balance.topology import Limits, Topology

NAME = "megatron_balance"
"""The value of `sequence_packing_scheduler` that chooses the balanced schedule."""

REPLACED = "default_dynamic_cp"
"""The name in `scheduler_map` that `--dynamic-context-parallel` chooses."""

SEAM = "megatron.core.datasets.data_schedule"
_AS_OLD = "megatron.core.datasets.data_schedule_utils"  # as scheduler_map

Groups = list[list[list[int]]]
"""`[num_microbatches][dp_size * cp_size]` lists of sample ids."""


def scheduler_class(base: type[Any], *, dynamic_cost: Callable[[], CostModel | None] | None = None) -> type[Any]:
    """Our scheduler on top of Megatron's `DpBalancedScheduler`; with `dynamic_cost` of `DefaultDynamicCPScheduler`.

    Where that returns no cost model, the plan is Megatron's own.
    """

    class PackingScheduler(base):
        """Plans one global batch; Megatron creates one for every step, and runs it by its own `run`."""

        @functools.wraps(base.__init__)
        def __init__(self, *positional: Any, **keywords: Any) -> None:
            super().__init__(*positional, **keywords)
            self.topology = Topology(
                self.dp_size,
                cp_size=self.cp_size,
                microbatch_multiple=self.microbatch_group_size_per_vp_stage or 1,
                dynamic_cp=dynamic_cost is not None,
            )

        def run(
            self, data_iterator: Any, num_microbatches: int, dp_group: Any, tp_group: Any, pp_group: Any, *rest: Any
        ) -> Any:
            self.topology = replace(self.topology, pp_size=pp_group.size())
            if dynamic_cost is not None:
                *_, config = rest
                chunks = config.virtual_pipeline_model_parallel_size or 1
                experts = getattr(config, "expert_model_parallel_size", 1)
                self.topology = replace(self.topology, vpp_size=chunks, ep_size=experts)
            return super().run(data_iterator, num_microbatches, dp_group, tp_group, pp_group, *rest)

        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> Groups:
            topology, cap, instead = self.topology, self.max_seqlen_per_dp_cp_rank, "choose dp_balanced"
            if dynamic_cost is None:
                groups = _groups_of_one_size(sample_id_seqlens, topology=topology, limits=Limits(cap))
            elif (cost := dynamic_cost()) is None:
                return super().get_groups_and_subsamples(sample_id_seqlens)
            else:
                instead = "drop --balance-data"
                groups = plan_rank_lists(
                    sample_id_seqlens,
                    cost_model=cost,
                    topology=topology,
                    max_tokens_per_gpu=cap,
                    min_cp_size=self.min_cp_size,
                )
            most = max((len(slot) for of_slot in groups for slot in of_slot), default=0)
            allowed = getattr(self, "max_num_seqs", None)
            if allowed is not None and most > allowed:
                raise BalanceError(
                    f"A micro-batch holds {most} samples and --thd-max-packed-sequences allows {allowed}, which {NAME} "
                    f"does not plan for: raise it, or {instead}."
                )
            return groups

    return PackingScheduler


def _groups_of_one_size(
    sample_id_seqlens: Sequence[tuple[int, int]], *, topology: Topology, limits: Limits
) -> list[list[list[int]]]:
    """A plan by FLOPs, by tokens where megatron.core is used alone; no list is empty."""
    ids = [sample for sample, _ in sample_id_seqlens]
    lengths = [int(length) for _, length in sample_id_seqlens]
    args = _megatron_args()
    cost_model = CostModel.tokens()
    if args is not None:
        ranks = replace(topology, ep_size=args.expert_model_parallel_size)
        cost_model = costs_of_args(args, topology=ranks, balance_by_flops=True).model
    schedule = build_data_schedule(lengths, cost_model=cost_model, topology=topology, limits=limits)
    slots = [[list(slot) for slot in slots] for slots in schedule.ranks]
    _fill_empty(slots, costs=[cost_model(length) for length in lengths])
    num_ranks = topology.dp_size * topology.cp_size
    return [
        [[ids[sample] for sample in slots[rank // topology.cp_size][slot]] for rank in range(num_ranks)]
        for slot in range(schedule.num_microbatches)
    ]


def _fill_empty(slots: list[list[list[int]]], *, costs: Sequence[int]) -> None:
    """Give every empty slot the cheapest sample of the costliest slot that has several; ties by index."""
    flat = [slot for of_rank in slots for slot in of_rank]
    for empty in (slot for slot in flat if not slot):
        donors = [slot for slot in flat if len(slot) > 1]
        if not donors:
            raise BalanceError(
                f"{sum(map(len, flat))} samples cannot fill {len(flat)} micro-batches, {len(slots[0])} on each of "
                f"{len(slots)} data-parallel ranks: raise --global-batch-size or --max-seqlen-per-dp-cp-rank."
            )
        donor = max(donors, key=lambda slot: sum(costs[sample] for sample in slot))
        cheapest = min(donor, key=lambda sample: (costs[sample], sample))
        donor.remove(cheapest)
        empty.append(cheapest)


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
        entries[REPLACED] = scheduler_class(stock, dynamic_cost=_dynamic_cost_model)
    return Registration(module, entries, names=larger) if entries else None


def _megatron_args() -> Any:
    """Megatron's arguments, None where megatron.core is used alone: they were parsed on all ranks or on none."""
    try:
        from megatron.training.global_vars import get_args

        return get_args()
    except (ModuleNotFoundError, AssertionError):  # the second says that there are none
        return None


def _dynamic_cost_model() -> CostModel | None:
    """FLOPs or the seconds of --balance-cost, the exchange of keys and values included; None without --balance-data."""
    args = _megatron_args()
    if not getattr(args, "balance_data", False):
        return None
    topology = replace(topology_of(vars(args)), dynamic_cp=True)
    return costs_of_args(args, topology=topology, balance_by_flops=True).model
