"""slime adapter: the schedule of a rollout batch (THUDM/slime) is made by `build_data_schedule`.

`install()` in the driver, before RolloutManager starts, or `python -m megatron_balance.adapters.slime train.py ARGS`.
slime's own flags turn balancing on: without `--balance-data` or `--balance-by-flops` its own function runs.

Rollouts are cut into optimiser steps of `global_batch_size`, siblings together, trailing ones dropped; every step is
planned; the plan is put into slime's order and into positions of the rollout batch.

Invariants: every rank runs the same number of micro-batches in a step, a multiple of the pipeline's group, none empty;
none of two samples or more is over the cap; every kept sample is placed once; `micro_batch_indices` of a rank,
flattened, are `range(len(partition))`.

slime's trainer cannot run an empty micro-batch. A step with fewer samples than its plan has micro-batches (five samples
that fill one each, on four ranks) is slime's own: one process plans for all ranks, so all take it.

`RolloutManager` is a Ray actor. Its class is pickled by value when the first one starts, with what its module has
bound by then. Ray pickles a function with an importable name by that name, so what is bound is a `partial`.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_balance.adapters.kit import Function, Hook, Installation, check_not_started, launch, split_rollout
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import Model, resolve_cost
from megatron_balance.errors import BalanceError
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
    return [schedule_hook(options, "slime.utils.dp_schedule", user="slime.ray.rollout")]


def schedule_hook(options: SlimeOptions, module: str, *, user: str) -> Hook:
    """The hook of `build_dp_schedule` in its module and in its user's."""
    return Hook(
        target=f"{module}:build_dp_schedule",
        parameters=("args", "train_parallel_config", "total_lengths", "global_batch_size", "rollout_indices"),
        bound_in=(module, user),
        wrap=lambda stock: functools.partial(balanced_dp_schedule, stock, options, Counter()),
        reason="RolloutManager asks it which rank runs which samples in which micro-batch",
    )


def balanced_dp_schedule(
    stock: Function,
    options: SlimeOptions,
    counts: Counter[str],
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
    given, or where there is no whole step.
    """
    steps = split_rollout(rollout_indices, global_batch_size=global_batch_size)
    num_rollouts = [len({rollout_indices[sample] for sample in samples}) for samples in steps]
    # The last part step is dropped, or kept where miles's flag asks for it and it has a sample for every rank.
    if steps and num_rollouts[-1] < global_batch_size:
        keeps = getattr(args, "allow_partial_train_step", False) and args.use_dynamic_batch_size and len(steps) > 1
        if not keeps or steps[-1].size < train_parallel_config["dp_size"]:
            del steps[-1]
    build = functools.partial(stock, args, train_parallel_config)
    if not (args.balance_data or getattr(args, "balance_by_flops", False)) or not steps:
        # slime's function raises its own error where there are too few rollouts.
        return build(total_lengths, global_batch_size=global_batch_size, rollout_indices=rollout_indices)
    lengths = as_integers(total_lengths, name="total_lengths")
    cost_model, is_dynamic = options.cost_model(args), args.use_dynamic_batch_size
    limits = Limits(args.max_tokens_per_gpu) if is_dynamic else Limits(micro_batch_size=args.micro_batch_size)
    topology = _topology(args, train_parallel_config=train_parallel_config)
    partitions: list[list[int]] = [[] for _ in range(topology.dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(topology.dp_size)]
    num_microbatches: list[int] = []
    for samples, num_groups in zip(steps, num_rollouts, strict=False):
        schedule = build_data_schedule(
            lengths[samples], cost_model=cost_model, topology=topology, limits=limits, objective=options.objective
        )
        counts["steps"] += 1
        if schedule.slot_counts().all():
            ranks = _in_slime_order(schedule)
        else:
            groups = [rollout_indices[sample] for sample in samples]
            stock_step = functools.partial(build, global_batch_size=num_groups, rollout_indices=groups)
            ranks = _stock_step(stock_step, schedule, counts)
        num_microbatches.append(len(ranks[0]))
        for partition, indices, slots in zip(partitions, micro_batch_indices, ranks, strict=True):
            for slot in slots:
                indices.append(list(range(len(partition), len(partition) + len(slot))))
                partition += samples[slot].tolist()
    return partitions, micro_batch_indices, num_microbatches, num_rollouts[: len(steps)]


def _stock_step(build: Function, schedule: DataSchedule, counts: Counter[str]) -> list[list[list[int]]]:
    """For every rank, for every micro-batch, samples of a step by the trainer's own function, logged and counted."""
    counts["stock"] += 1
    size = f"{schedule.lengths.size} samples for {schedule.num_microbatches} micro-batches on each rank"
    try:
        partitions, indices, _, _ = build(schedule.lengths.tolist())
    except AssertionError as error:
        raise BalanceError(
            f"a step has {size}, and it fails without balancing too ({error}): change "
            "--global-batch-size or the samples of a rollout, or raise --max-tokens-per-gpu."
        ) from error
    # Once as a warning: with rollouts of any number of samples it may be every second step.
    level = logging.WARNING if counts["stock"] == 1 else logging.INFO
    text = "A step has %s: all ranks take its plan of a run without balancing, as in %d of %d steps so far."
    logger.log(level, text, size, counts["stock"], counts["steps"])
    return [
        [[part[index] for index in slot] for slot in slots] for part, slots in zip(partitions, indices, strict=True)
    ]


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
