"""Registers the balanced schedule as a packing scheduler of Megatron, where it has them (main and dev, 0.20).

    config.sequence_packing_scheduler = "megatron_balance"     # then Megatron's wrap_data_iterator chooses it

Megatron's `DpBalancedScheduler` fetches, gathers lengths, asks `get_groups_and_subsamples` for a plan, moves samples
and packs them. Ours is a subclass in which this method calls `build_data_schedule`. Others, such as verl, call the
method themselves.

Invariants of a plan: every sample once; every rank has a sample in every micro-batch; context-parallel ranks of a
data-parallel rank have the same samples; a micro-batch of several samples keeps to `max_seqlen_per_dp_cp_rank` tokens a
GPU and to `max_num_seqs`. `Registration.undo` restores Megatron.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.setup.arguments import flops_from_megatron_args
from megatron_balance.planner import build_data_schedule
from megatron_balance.topology import Limits, Topology

NAME = "megatron_balance"
"""The value of `sequence_packing_scheduler` that chooses the balanced schedule."""

SEAM = "megatron.core.datasets.data_schedule"
MOVED_ON = "megatron.core.datasets.data_schedule_utils"  # as old as scheduler_map


def balanced_groups(
    sample_id_seqlens: Sequence[tuple[int, int]],
    *,
    topology: Topology,
    limits: Limits,
    cost_model: CostModel,
) -> list[list[list[int]]]:
    """A plan in the form of Megatron's packing schedulers.

    Args:
        sample_id_seqlens: `[num_samples]` pairs of id and padded length, tokens.
        topology: the ranks.
        limits: tokens of a micro-batch.
        cost_model: of a sample.

    Returns:
        `[num_microbatches][dp_size * cp_size]` lists of ids, none empty.

    Raises:
        BalanceError: there are fewer samples than the micro-batches of all ranks.
    """
    ids = [sample for sample, _ in sample_id_seqlens]
    lengths = [int(length) for _, length in sample_id_seqlens]
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


def scheduler_class(base: type[Any]) -> type[Any]:
    """Our scheduler on top of one of Megatron's.

    Args:
        base: Megatron's `DpBalancedScheduler`, which fetches, moves and packs samples by a plan.
    """

    class PackingScheduler(base):
        """Balances one global batch over the data-parallel ranks; Megatron builds one for every step."""

        @functools.wraps(base.__init__)
        def __init__(self, *positional: Any, **keywords: Any) -> None:
            super().__init__(*positional, **keywords)
            self.topology = Topology(
                self.dp_size,
                cp_size=self.cp_size,
                microbatch_multiple=self.microbatch_group_size_per_vp_stage or 1,
            )
            self.limits = Limits(self.max_seqlen_per_dp_cp_rank)

        def run(
            self, data_iterator: Any, num_microbatches: int, dp_group: Any, tp_group: Any, pp_group: Any, *rest: Any
        ) -> Any:
            """One step, by Megatron's own `run`, planned for this many pipeline stages."""
            self.topology = replace(self.topology, pp_size=pp_group.size())
            return super().run(data_iterator, num_microbatches, dp_group, tp_group, pp_group, *rest)

        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
            """As `balanced_groups`.

            Raises:
                BalanceError: too few samples, or a micro-batch of more samples than `max_num_seqs`.
            """
            groups = balanced_groups(
                sample_id_seqlens, topology=self.topology, limits=self.limits, cost_model=_cost_model()
            )
            check_num_samples(groups, allowed=getattr(self, "max_num_seqs", None), instead="choose dp_balanced")
            return groups

    return PackingScheduler


def check_num_samples(groups: Sequence[Sequence[Sequence[int]]], *, allowed: int | None, instead: str) -> None:
    """Checks the samples of every micro-batch.

    Args:
        groups: `[num_microbatches][num_ranks]` lists of sample ids.
        allowed: samples of a micro-batch, at most; None for any number.
        instead: what else a user may do, for the message.

    Raises:
        BalanceError: a micro-batch holds more.
    """
    most = max((len(slot) for of_slot in groups for slot in of_slot), default=0)
    if allowed is not None and most > allowed:
        raise BalanceError(
            f"A micro-batch holds {most} samples and --thd-max-packed-sequences allows {allowed}, which {NAME} does "
            f"not plan for: raise it, or {instead}."
        )


class Registration:
    """The scheduler's entry in Megatron; `undo` removes it.

    Megatron's main looks a name up in an enumeration and its member in `scheduler_map`; dev keys the map by names.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._names: Any = getattr(module, "PackingSchedulerEnum", None)
        added: dict[Any, Any] = {}
        key: Any = NAME
        if self._names is not None:
            # An enumeration cannot grow: a larger one replaces it. Members of the old one stay keys of the map.
            members = {member.name: member.value for member in self._names}
            self._larger: Any = enum.Enum(self._names.__name__, {**members, NAME.upper(): NAME})
            added = {self._larger[member.name]: module.scheduler_map[member] for member in self._names}
            key = self._larger[NAME.upper()]
            module.PackingSchedulerEnum = self._larger
        self._added = added | {key: scheduler_class(module.DpBalancedScheduler)}
        module.scheduler_map.update(self._added)

    def undo(self) -> None:
        """Restore Megatron.

        Raises:
            BalanceError: someone else has replaced the enumeration since; nothing is changed then.
        """
        if self._names is not None:
            if self._module.PackingSchedulerEnum is not self._larger:
                raise BalanceError(f"{SEAM}.PackingSchedulerEnum was replaced after {NAME} was added: undo that first.")
            self._module.PackingSchedulerEnum = self._names
        for key in self._added:
            del self._module.scheduler_map[key]


def register() -> Registration | None:
    """Add the scheduler where this Megatron has a `scheduler_map` of a known form; None where it has none.

    Training with the balance flags does not need it: an unknown form is left unchanged.
    """
    if importlib.util.find_spec(MOVED_ON) is None:
        return None
    module = importlib.import_module(SEAM)
    schedulers: Any = getattr(module, "scheduler_map", None)
    names: Any = getattr(module, "PackingSchedulerEnum", None)
    if not isinstance(schedulers, dict) or not hasattr(module, "DpBalancedScheduler"):
        return None
    if names is None:
        return Registration(module) if all(isinstance(key, str) for key in schedulers) else None
    if not isinstance(names, enum.EnumMeta) or any(member not in schedulers for member in list(names)):
        return None
    return Registration(module)


def _cost_model() -> CostModel:
    """FLOPs of the model that Megatron's arguments describe; tokens where megatron.core is used alone.

    The same on every rank: arguments were parsed on all of them or on none.
    """
    try:
        from megatron.training.global_vars import get_args
    except ModuleNotFoundError:  # megatron.core alone
        return CostModel.tokens()
    try:
        args: Any = get_args()
    except AssertionError:  # that there are none
        return CostModel.tokens()
    return flops_from_megatron_args(args)
