"""slime adapter: the schedule of a rollout batch (THUDM/slime) is made by `build_data_schedule`.

`install()` in the driver, before RolloutManager starts, or `python -m megatron_balance.adapters.slime train.py ARGS`.
slime's own flags turn balancing on: without `--balance-data` or `--balance-by-flops` its own function runs.

Rollouts are cut into optimiser steps of `global_batch_size`, siblings together, trailing ones dropped; every step is
planned; the plan is put into slime's order and into positions of the rollout batch.

Invariants: every rank runs the same number of micro-batches in a step, a multiple of the pipeline's group, none empty;
none of two samples or more is over the cap; every kept sample is placed once; `micro_batch_indices` of a rank,
flattened, are `range(len(partition))`.

slime's trainer cannot run an empty micro-batch. Where a step has fewer samples than its plan has micro-batches (five
samples that fill one each, on four ranks) the rollout batch is planned by slime: one process plans for all ranks.

`RolloutManager` is a Ray actor. Its class is pickled by value when the first one starts, with what its module has
bound by then. Ray pickles a function with an importable name by that name, so what is bound is a `partial`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_balance.adapters.kit import Function, Hook, Installation, check_not_started, launch, split_rollout
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import Model, resolve_cost
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner import DataSchedule, as_integers, build_data_schedule, is_makespan
from megatron_balance.topology import Limits, Topology

__all__ = ["SlimeOptions", "balanced_dp_schedule", "install", "is_installed"]

logger = logging.getLogger(__name__)

SPECS_DESCRIBED_BY_CHECKPOINT = (
    "slime_plugins.models.glm5.glm5",
    "slime_plugins.models.qwen3_5",
    "slime_plugins.models.qwen3_5_vl",
    "slime_plugins.models.qwen3_next",
)
"""Modules of slime's `--spec` whose sparse or linear attention is described by the checkpoint's config alone."""


@dataclass(frozen=True, kw_only=True)
class SlimeOptions:
    """The arguments of `install`."""

    cost: str | None = None
    model: Model | None = None
    objective: str = "auto"

    def cost_model(self, args: Any) -> CostModel:
        """The cost model for slime's arguments."""
        model = self.model
        if model is None and self.cost in (None, "flops"):
            spec = getattr(args, "spec", None) or [""]
            is_described = spec[0] in SPECS_DESCRIBED_BY_CHECKPOINT
            model = args.hf_checkpoint if is_described else ModelShape.from_megatron_args(args)
        return resolve_cost(self.cost, model=model, ep_size=_size(args, "expert_model_parallel_size"))


installation: Installation[SlimeOptions] = Installation(
    "slime",
    versions=("0.3",),
    remedy="check out one of these from github.com/THUDM/slime (the slime on PyPI is another project) or train without "
    "balancing",
)
is_installed = installation.is_installed


def install(
    *, cost: str | None = None, model: Model | None = None, objective: str = "auto"
) -> Installation[SlimeOptions]:
    """Hook slime in this process, the driver. Installing twice with the same options installs once.

    Args:
        cost: `flops`, `tokens` or the path of a seconds.json; by default FLOPs.
        model: model whose FLOPs are counted: a preset's name, a Hugging Face config.json or a ModelShape; by
            default the one that slime's arguments describe, or, for a `--spec` that goes beyond them, the
            config.json of `--hf-checkpoint`.
        objective: when ranks wait for one another: `auto` (from the parallel sizes), `step`, `microbatch` or
            `pipeline`.

    Raises:
        BalanceError: slime is missing, of another version, a target has moved, RolloutManager has been started
            already, or hooks for other options are in place; nothing is changed then.
    """
    options = SlimeOptions(cost=cost, model=model, objective=objective)
    return installation.install(options, lambda: _hooks(options))


def _hooks(options: SlimeOptions) -> list[Hook]:
    check_not_started(getattr(sys.modules.get("slime.ray.rollout"), "RolloutManager", None))
    return [
        Hook(
            target="slime.utils.dp_schedule:build_dp_schedule",
            parameters=("args", "train_parallel_config", "total_lengths", "global_batch_size", "rollout_indices"),
            bound_in=("slime.utils.dp_schedule", "slime.ray.rollout"),
            wrap=lambda stock: functools.partial(balanced_dp_schedule, stock, options),
            reason="RolloutManager asks it which rank runs which samples in which micro-batch",
        )
    ]


def balanced_dp_schedule(
    stock: Function,
    options: SlimeOptions,
    args: Any,
    train_parallel_config: dict[str, int],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Replaces `slime.utils.dp_schedule.build_dp_schedule`: the schedule of one rollout batch.

    That is `partitions[dp_rank]`, the positions of its samples; `micro_batch_indices[dp_rank]`, for every micro-batch,
    indices into that; micro-batches of a rank and rollouts, for every step. It is slime's own where neither flag is
    given, where there is no whole step, or where a step has fewer samples than micro-batches.
    """
    sizes: Any = {"global_batch_size": global_batch_size, "rollout_indices": rollout_indices}
    num_steps = len({*rollout_indices}) // global_batch_size
    if not (args.balance_data or getattr(args, "balance_by_flops", False)) or not num_steps:
        return stock(args, train_parallel_config, total_lengths, **sizes)
    lengths = as_integers(total_lengths, name="total_lengths")
    steps = split_rollout(rollout_indices, global_batch_size=global_batch_size)[:num_steps]
    is_dynamic = args.use_dynamic_batch_size
    plan = functools.partial(
        build_data_schedule,
        cost_model=options.cost_model(args),
        topology=_topology(args, train_parallel_config=train_parallel_config),
        limits=Limits(args.max_tokens_per_gpu) if is_dynamic else Limits(micro_batch_size=args.micro_batch_size),
        objective=options.objective,
    )
    schedules = [plan(lengths[samples]) for samples in steps]
    if num_short := sum(not schedule.slot_counts().all() for schedule in schedules):
        text = (
            "%d of %d steps have fewer samples than micro-batches: all ranks take slime's plan of this rollout batch."
        )
        logger.warning(text, num_short, num_steps)
        return stock(args, train_parallel_config, total_lengths, **sizes)
    partitions: list[list[int]] = [[] for _ in schedules[0].ranks]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in partitions]
    for samples, schedule in zip(steps, schedules, strict=True):
        for partition, indices, slots in zip(partitions, micro_batch_indices, _in_slime_order(schedule), strict=True):
            for slot in slots:
                indices.append(list(range(len(partition), len(partition) + len(slot))))
                partition += samples[slot].tolist()
    num_microbatches = [schedule.num_microbatches for schedule in schedules]
    return partitions, micro_batch_indices, num_microbatches, [global_batch_size] * num_steps


def _topology(args: Any, *, train_parallel_config: Mapping[str, int]) -> Topology:
    """The ranks of a run, from slime's arguments and the sizes that its trainer reports.

    slime pads a sample for context parallelism, and a micro-batch, not a sample, for sequence parallelism
    (`get_batch` in slime/backends/megatron_utils/data.py). So sample lengths need not be multiples of `tp_size`.
    """
    vpp_size, tp_size = train_parallel_config["vpp_size"] or 1, _size(args, "tensor_model_parallel_size")
    return Topology(
        train_parallel_config["dp_size"],
        cp_size=train_parallel_config["cp_size"],
        tp_size=tp_size,
        pp_size=_size(args, "pipeline_model_parallel_size"),
        ep_size=_size(args, "expert_model_parallel_size"),
        etp_size=_size(args, "expert_tensor_parallel_size", default=tp_size),
        vpp_size=vpp_size,
        microbatch_multiple=train_parallel_config["microbatch_group_size_per_vp_stage"] if vpp_size > 1 else 1,
        fully_sharded=bool(getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False)),
        # All data-parallel ranks reduce a number in every micro-batch.
        reduces_in_microbatches=bool(getattr(args, "fp8", None)) and getattr(args, "fp8_recipe", "") == "delayed",
    )


def _size(args: Any, name: str, *, default: int = 1) -> int:
    return getattr(args, name, None) or default


def _in_slime_order(schedule: DataSchedule) -> list[list[list[int]]]:
    """For every rank, for every slot, sample ids: slots cheapest first on all ranks, but in a pipeline's order.

    Ranks that share no experts come costliest first. So all predicted times stay the same.
    """
    order = 1 if is_makespan(schedule.objective, topology=schedule.topology) else -1
    ranks = [[list(slot) for slot in slots[::order]] for slots in schedule.ranks]
    if schedule.topology.ep_dp_size > 1:
        return ranks
    return [ranks[rank] for rank in (-schedule.cost_grid.sum(axis=1)).argsort(kind="stable")]


if __name__ == "__main__":
    launch("megatron_balance.adapters.slime")
