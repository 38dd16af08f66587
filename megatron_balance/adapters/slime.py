"""slime adapter: the schedule of a rollout batch (THUDM/slime) is made by `build_data_schedule`.

    from megatron_balance.adapters import slime
    patches = slime.install()      # in the driver, before RolloutManager is started
    patches.undo()

or, with nothing to edit, `python -m megatron_balance.adapters.slime train.py ARGS`. slime's own flags turn balancing
on: without `--balance-data` or `--balance-by-flops` its own function runs.

    1. rollouts are cut into optimiser steps of `global_batch_size`, siblings together, trailing ones dropped
    2. every step is planned: balanced micro-batches, balanced ranks
    3. the plan is put into slime's order and into positions of the rollout batch

Invariants (slime's own, from the module docstring of slime/utils/dp_schedule.py, and more):

    - every rank runs the same number of micro-batches in a step, a multiple of the pipeline's group
    - no micro-batch of two samples or more is over the cap
    - every kept sample is placed once; further mentions are `MaskedCopy`
    - `micro_batch_indices` of a rank, flattened, are `range(len(partition))`; no micro-batch is empty
    - ranks come costliest first in a step, as largest differencing leaves them, the micro-batches of a rank
      cheapest first, or in the pipeline's order

slime's trainer cannot run an empty micro-batch. Where one would stay empty (five samples that fill one each, on four
ranks), a rank runs a copy of the step's shortest sample with a loss mask of zeros: slime's own way to take a sample out
of the loss (`Sample.remove_sample`). Loss and gradients do not change.

`RolloutManager` is a Ray actor. Its class is pickled by value when the first one starts, with what its module has
bound by then. Ray pickles a function with an importable name by that name, so what is bound is a `partial`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_balance.adapters.kit import Adapter, Function, Hook, check_not_started, launch, split_rollout
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner import DataSchedule, as_integers, build_data_schedule, is_makespan
from megatron_balance.topology import Limits, Topology

__all__ = ["MaskedCopy", "SlimeOptions", "balanced_dp_schedule", "install", "is_installed"]

SPECS_DESCRIBED_BY_CHECKPOINT = (
    "slime_plugins.models.glm5.glm5",
    "slime_plugins.models.qwen3_5",
    "slime_plugins.models.qwen3_5_vl",
    "slime_plugins.models.qwen3_next",
)
"""Modules of slime's `--spec` whose sparse or linear attention is described by the checkpoint's config alone."""


@dataclass(frozen=True, kw_only=True)
class SlimeOptions:
    """Options of the plans of rollout batches.

    Attributes:
        cost: `flops`, `tokens` or the path of a seconds.json; by default FLOPs.
        model: model whose FLOPs are counted: a preset's name, a Hugging Face config.json or a ModelShape; by
            default the one that slime's arguments describe, or, for a `--spec` that goes beyond them, the
            config.json of `--hf-checkpoint`.
        objective: `auto` (from the parallel sizes), `step`, `microbatch` or `pipeline`.
    """

    cost: str | None = None
    model: Model | None = None
    objective: str = "auto"

    def cost_model(self, args: Any) -> CostModel:
        """The cost model for slime's arguments."""
        model = self.model
        if model is None and self.cost in (None, "flops"):
            spec = getattr(args, "spec", None) or [""]
            of_checkpoint = spec[0] in SPECS_DESCRIBED_BY_CHECKPOINT
            model = args.hf_checkpoint if of_checkpoint else ModelShape.from_megatron_args(args)
        return resolve_cost(self.cost, model=model, ep_size=_size(args, "expert_model_parallel_size"))


adapter: Adapter[SlimeOptions] = Adapter(
    "slime",
    versions=("0.3",),
    remedy="check out one of these from github.com/THUDM/slime (the slime on PyPI is another project) or train without "
    "balancing",
)
is_installed = adapter.is_installed


def install(*, cost: str | None = None, model: Model | None = None, objective: str = "auto") -> Adapter[SlimeOptions]:
    """Hook slime in this process, the driver. Installing twice with the same options installs once.

    Args:
        cost: see `SlimeOptions`, as are the others.
        model: model whose FLOPs are counted.
        objective: when ranks wait for one another.

    Raises:
        BalanceError: slime is missing, of another version, a target has moved, RolloutManager has been started
            already, or hooks for other options are in place; nothing is changed then.
    """
    options = SlimeOptions(cost=cost, model=model, objective=objective)
    return adapter.hook(options, lambda: _hooks(options))


def _hooks(options: SlimeOptions) -> tuple[Hook, ...]:
    check_not_started(getattr(sys.modules.get("slime.ray.rollout"), "RolloutManager", None))
    return (
        Hook(
            target="slime.utils.dp_schedule:build_dp_schedule",
            parameters=("args", "train_parallel_config", "total_lengths", "global_batch_size", "rollout_indices"),
            bound_in=("slime.utils.dp_schedule", "slime.ray.rollout"),
            wrap=lambda stock: functools.partial(balanced_dp_schedule, stock, options),
            why="RolloutManager asks it which rank runs which samples in which micro-batch",
            until="slime takes a schedule function by path, as it takes others",
        ),
        Hook(
            target="slime.observability.rollout_data_utils:tensorize_rollout_data_for_training",
            parameters=("rollout_data",),
            bound_in=("slime.observability.rollout_data_utils", "slime.ray.rollout"),
            wrap=lambda stock: functools.partial(_tensorize_masked, stock),
            why="the last function before data is sent: copies that fill an empty micro-batch are masked there",
            until="slime's trainer runs an empty micro-batch",
        ),
    )


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
    given, or where there is no whole step.
    """
    steps = split_rollout(rollout_indices, global_batch_size=global_batch_size)
    num_rollouts = [len({rollout_indices[sample] for sample in samples}) for samples in steps]
    # The last part step is dropped, or kept where miles's flag asks for it and it has a sample for every rank.
    if steps and num_rollouts[-1] < global_batch_size:
        keeps = getattr(args, "allow_partial_train_step", False) and args.use_dynamic_batch_size and len(steps) > 1
        if not keeps or steps[-1].size < train_parallel_config["dp_size"]:
            del steps[-1]
    if not (args.balance_data or getattr(args, "balance_by_flops", False)) or not steps:
        # slime's function raises its own error where there are too few rollouts.
        sizes = {"global_batch_size": global_batch_size, "rollout_indices": rollout_indices}
        return stock(args, train_parallel_config, total_lengths, **sizes)
    lengths = as_integers(total_lengths, name="total_lengths")
    cost_model, limits = options.cost_model(args), _limits(args)
    topology = _topology(args, train_parallel_config=train_parallel_config)
    partitions: list[list[int]] = [[] for _ in range(topology.dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(topology.dp_size)]
    num_microbatches: list[int] = []
    for samples in steps:
        schedule = build_data_schedule(
            lengths[samples], cost_model=cost_model, topology=topology, limits=limits, objective=options.objective
        )
        num_microbatches.append(schedule.num_microbatches)
        # What an empty micro-batch runs: the shortest sample that has tokens.
        known: list[int] = schedule.lengths.tolist()
        copy = MaskedCopy(min(range(len(known)), key=lambda sample: (known[sample] == 0, known[sample], sample)))
        for partition, indices, slots in zip(partitions, micro_batch_indices, _in_slime_order(schedule), strict=True):
            for held in slots:
                indices.append(list(range(len(partition), len(partition) + max(len(held), 1))))
                # A copy stays a MaskedCopy when it becomes a position of the rollout batch.
                partition += [type(local)(samples[local]) for local in held or [copy]]
    return partitions, micro_batch_indices, num_microbatches, num_rollouts[: len(steps)]


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
    )


def _limits(args: Any) -> Limits:
    if not args.use_dynamic_batch_size:
        return Limits(micro_batch_size=args.micro_batch_size)
    if args.max_tokens_per_gpu is None:
        raise BalanceError("--use-dynamic-batch-size is given and --max-tokens-per-gpu is not: give the cap in tokens.")
    return Limits(args.max_tokens_per_gpu)


def _size(args: Any, name: str, *, default: int = 1) -> int:
    return getattr(args, name, None) or default


def _in_slime_order(schedule: DataSchedule) -> list[list[list[int]]]:
    """For every rank, for every slot, sample ids: ranks costliest first, slots cheapest first.

    Ranks change places inside their expert-parallel group, and groups as a whole; slots are reversed on all ranks or on
    none. So all predicted times stay the same.
    """
    costs: list[int] = schedule.cost_grid.sum(axis=1).tolist()
    span = schedule.topology.ep_span
    groups: list[list[int]] = []
    for first in range(0, len(costs), span):
        groups.append(sorted(range(first, first + span), key=lambda rank: (-costs[rank], schedule.ranks[rank])))
    groups.sort(key=lambda ranks: ([-costs[rank] for rank in ranks], schedule.ranks[ranks[0]]))
    order = 1 if is_makespan(schedule.objective, topology=schedule.topology) else -1
    return [[list(held) for held in schedule.ranks[rank][::order]] for ranks in groups for rank in ranks]


class MaskedCopy(int):
    """Position in the rollout batch of a sample that also runs elsewhere; the loss of this copy is masked."""


def mask_copies(rollout_data: dict[str, Any]) -> None:
    """Masks the copies of one rank in place, before its data is sent; `partition` then holds plain integers."""
    partition = rollout_data.get("partition", [])
    copies = [index for index, sample in enumerate(partition) if isinstance(sample, MaskedCopy)]
    if not copies:
        return
    if "loss_masks" not in rollout_data:
        raise BalanceError(
            "the rollout data has no loss_masks, and a step has fewer samples than micro-batches: let "
            "--custom-convert-samples-to-train-data-path give loss_masks, or raise --max-tokens-per-gpu."
        )
    masks = list(rollout_data["loss_masks"])
    for index in copies:
        masks[index] = [0] * len(masks[index])
    rollout_data["loss_masks"] = masks
    rollout_data["partition"] = [int(sample) for sample in partition]


def _tensorize_masked(stock: Function, rollout_data: dict[str, Any]) -> None:
    mask_copies(rollout_data)
    stock(rollout_data)


if __name__ == "__main__":
    launch("megatron_balance.adapters.slime")
