"""Plans dynamic context parallelism for Megatron's dev branch, whose own executor runs the plan.

    pretrain_gpt.py … --dynamic-context-parallel --max-seqlen-per-dp-cp-rank N --balance-data

Dev's `DefaultDynamicCPScheduler` fetches samples, gathers lengths, calls `get_groups_and_subsamples` for a plan, moves
samples and packs them. The subclass here overrides that method. Dev's arguments and configuration accept no other name
with dynamic context parallelism, so the subclass replaces its base under that name in `scheduler_map`; without
`--balance-data` it returns Megatron's own plan.

`planner/rank_lists.py` has the contract of a plan. `Replacement.undo` restores Megatron.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.packing_scheduler import MOVED_ON, SEAM, check_num_samples
from megatron_balance.mcore.setup.arguments import BalanceConfig, cost_model_from_megatron_args
from megatron_balance.planner import RankLists, plan_rank_lists
from megatron_balance.topology import Topology

REPLACED = "default_dynamic_cp"
"""The name in `scheduler_map` that `--dynamic-context-parallel` chooses."""


def dynamic_scheduler_class(base: type[Any], *, cost_model: Callable[[], CostModel | None]) -> type[Any]:
    """The class of the balanced scheduler, a subclass of Megatron's.

    Args:
        base: Megatron's `DefaultDynamicCPScheduler`, which fetches, moves and packs samples by a plan.
        cost_model: returns the cost of a sample; None leaves the plan to `base`.
    """

    class DynamicCpPackingScheduler(base):
        """Plans groups of DP×CP ranks for one global batch; Megatron creates an instance for every step."""

        @functools.wraps(base.__init__)
        def __init__(self, *positional: Any, **keywords: Any) -> None:
            super().__init__(*positional, **keywords)
            self.topology = Topology(
                self.dp_size,
                cp_size=self.cp_size,
                microbatch_multiple=self.microbatch_group_size_per_vp_stage or 1,
                dynamic_cp=True,
            )

        def run(
            self, data_iterator: Any, num_microbatches: int, dp_group: Any, tp_group: Any, pp_group: Any, *rest: Any
        ) -> Any:
            """Run Megatron's own `run`, with a plan for this pipeline and these experts."""
            *_, config = rest
            self.topology = replace(
                self.topology,
                pp_size=pp_group.size(),
                vpp_size=config.virtual_pipeline_model_parallel_size or 1,
                ep_size=getattr(config, "expert_model_parallel_size", 1),
            )
            return super().run(data_iterator, num_microbatches, dp_group, tp_group, pp_group, *rest)

        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> RankLists:
            """Plan by `plan_rank_lists`.

            Raises:
                BalanceError: too few samples, or a micro-batch of more samples than `max_num_seqs`.
            """
            cost = cost_model()
            if cost is None:
                return super().get_groups_and_subsamples(sample_id_seqlens)
            groups = plan_rank_lists(
                sample_id_seqlens,
                cost_model=cost,
                topology=self.topology,
                max_tokens_per_gpu=self.max_seqlen_per_dp_cp_rank,
                min_cp_size=self.min_cp_size,
            )
            check_num_samples(groups, allowed=self.max_num_seqs, instead="drop --balance-data")
            return groups

    return DynamicCpPackingScheduler


class Replacement:
    """The balanced scheduler in `scheduler_map` in place of Megatron's; `undo` restores Megatron's."""

    def __init__(self, schedulers: dict[str, type[Any]]) -> None:
        self._schedulers = schedulers
        self._stock = schedulers[REPLACED]
        self._ours = dynamic_scheduler_class(self._stock, cost_model=_cost_model)
        schedulers[REPLACED] = self._ours

    def undo(self) -> None:
        """Restore Megatron's scheduler.

        Raises:
            BalanceError: other code has replaced the entry since; nothing is changed then.
        """
        if self._schedulers.get(REPLACED) is not self._ours:
            raise BalanceError(f"{SEAM}.scheduler_map[{REPLACED!r}] was replaced after it was hooked: undo that first.")
        self._schedulers[REPLACED] = self._stock


def replace_dynamic_scheduler() -> Replacement | None:
    """Replace this Megatron's scheduler of dynamic context parallelism; None if it has none."""
    if importlib.util.find_spec(MOVED_ON) is None:
        return None
    schedulers: Any = getattr(importlib.import_module(SEAM), "scheduler_map", None)
    if not isinstance(schedulers, dict) or not isinstance(schedulers.get(REPLACED), type):
        return None
    return Replacement(schedulers)


def _cost_model() -> CostModel | None:
    """FLOPs or the seconds of --balance-cost, the exchange of keys and values included; None without --balance-data.

    The same on every rank: arguments were parsed on all of them or on none.
    """
    try:
        from megatron.training.global_vars import get_args
    except ModuleNotFoundError:  # megatron.core alone
        return None
    try:
        args: Any = get_args()
    except AssertionError:  # Megatron has not parsed its arguments
        return None
    if not getattr(args, "balance_data", False):
        return None
    config = replace(BalanceConfig.unchecked(args), dynamic_cp=True, balance_by_flops=True)
    return cost_model_from_megatron_args(args, config=config)
