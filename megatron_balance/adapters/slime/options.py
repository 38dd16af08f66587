"""What a user may choose about balanced schedules in slime, and the plan of one optimiser step that follows.

slime's arguments are Megatron's, so that the model, its ranks and the cap are read from them. Invariants:
with `strict_cap` no micro-batch of two samples or more is over the cap; without it, there are never more
micro-batches than the tokens of the step fill, and never fewer than with it at a higher cap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape
from megatron_balance.planner.build import build_data_schedule
from megatron_balance.planner.schedule import DataSchedule
from megatron_balance.topology import Limits, Topology

SPECS_TOLD_BY_CHECKPOINT = ("slime_plugins.models.qwen3_5", "slime_plugins.models.qwen3_next")
"""Modules of slime's `--spec` with linear-attention layers that no argument names: the checkpoint's config does."""

CAP_STEPS = 128
"""Without `strict_cap`, the cap is raised by whole parts of this many of it."""


@dataclass(frozen=True)
class SlimeOptions:
    """How rollout batches are planned.

    Attributes:
        cost: `flops`, `tokens` or the path of a calibration.json; by default FLOPs.
        model: the model that FLOPs are of: a preset's name, a Hugging Face config.json or a ModelShape; by
            default the one that slime's arguments describe, or, for a `--spec` that says more than they do, the
            config.json of `--hf-checkpoint`.
        objective: `auto` (from the parallel sizes), `step`, `microbatch` or `pipeline`.
        algorithm: `auto`, or a name in `planner.partition.ALGORITHMS`.
        strict_cap: never more than `--max-tokens-per-gpu` × context-parallel size tokens in a micro-batch of
            several samples. False counts micro-batches as slime does, by total tokens over the cap, and where
            they do not hold the samples, raises the cap by as little as that takes: fewer micro-batches, more
            memory.
    """

    _: KW_ONLY
    cost: str | None = None
    model: Model | None = None
    objective: str = "auto"
    algorithm: str = "auto"
    strict_cap: bool = True

    def cost_model(self, args: Any) -> CostModel:
        """The cost model for slime's arguments."""
        model = self.model
        if model is None and self.cost in (None, "flops"):
            spec = getattr(args, "spec", None) or [""]
            of_checkpoint = spec[0] in SPECS_TOLD_BY_CHECKPOINT
            model = args.hf_checkpoint if of_checkpoint else ModelShape.from_megatron_args(args)
        return resolve_cost(self.cost, model=model, ep_size=_size(args, "expert_model_parallel_size"))


def topology_from_slime(args: Any, *, train_parallel_config: Mapping[str, int]) -> Topology:
    """The ranks of a run, from slime's arguments and the sizes that its trainer reports.

    slime pads a sample for context parallelism, and a micro-batch, not a sample, for sequence parallelism
    (`get_batch` in slime/backends/megatron_utils/data.py), so that samples are no multiple of `tp_size`.
    """
    vpp_size, tp_size = train_parallel_config["vpp_size"], _size(args, "tensor_model_parallel_size")
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


def limits_from_slime(args: Any) -> Limits:
    """What a micro-batch holds: tokens with dynamic batches, else a number of samples.

    Raises:
        BalanceError: dynamic batches have no cap.
    """
    if not args.use_dynamic_batch_size:
        return Limits(micro_batch_size=args.micro_batch_size)
    if args.max_tokens_per_gpu is None:
        raise BalanceError("--use-dynamic-batch-size is given and --max-tokens-per-gpu is not: give the cap in tokens.")
    return Limits(args.max_tokens_per_gpu)


def plan_step(
    lengths: NDArray[np.int64], *, options: SlimeOptions, cost_model: CostModel, topology: Topology, limits: Limits
) -> DataSchedule:
    """The plan of one optimiser step.

    Args:
        lengths: `[num_samples]` tokens.
        options: the user's choice.
        cost_model: what a sample costs.
        topology: the ranks.
        limits: what a micro-batch holds.
    """

    def plan(within: Limits) -> DataSchedule:
        return build_data_schedule(
            lengths,
            cost_model=cost_model,
            topology=topology,
            limits=within,
            objective=options.objective,
            algorithm=options.algorithm,
        )

    schedule = plan(limits)
    cap = limits.max_tokens_per_gpu
    if options.strict_cap or cap is None:
        return schedule
    total = int(topology.padded_seq_len(lengths).sum())
    slots, per_slot = topology.dp_size * topology.microbatch_multiple, cap * topology.cp_size
    fewest = max(-(-total // (per_slot * slots)), 1) * topology.microbatch_multiple
    # The least number of steps above the cap that gives as few micro-batches, found by halving.
    step = max(cap // CAP_STEPS, 1)
    too_low, enough = 0, -(-total // (step * topology.cp_size))
    if schedule.num_microbatches <= fewest:
        return schedule
    while enough - too_low > 1:
        middle = (too_low + enough) // 2
        found = plan(Limits(cap + middle * step))
        if found.num_microbatches <= fewest:
            schedule, enough = found, middle
        else:
            too_low = middle
    return schedule if schedule.num_microbatches <= fewest else plan(Limits(cap + enough * step))


def _size(args: Any, name: str, *, default: int = 1) -> int:
    return getattr(args, name, None) or default
