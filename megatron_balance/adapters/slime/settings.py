"""The adapter's options, and the model, ranks and token cap read from slime's arguments, which are Megatron's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import Model, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Limits, Topology

SPECS_DESCRIBED_BY_CHECKPOINT = (
    "slime_plugins.models.glm5.glm5",
    "slime_plugins.models.qwen3_5",
    "slime_plugins.models.qwen3_5_vl",
    "slime_plugins.models.qwen3_next",
)
"""Modules of slime's `--spec` whose sparse or linear attention is described by the checkpoint's config alone."""


@dataclass(frozen=True)
class SlimeOptions:
    """Options of the plans of rollout batches.

    Attributes:
        cost: `flops`, `tokens` or the path of a seconds.json; by default FLOPs.
        model: model whose FLOPs are counted: a preset's name, a Hugging Face config.json or a ModelShape; by
            default the one that slime's arguments describe, or, for a `--spec` that goes beyond them, the
            config.json of `--hf-checkpoint`.
        objective: `auto` (from the parallel sizes), `step`, `microbatch` or `pipeline`.
        algorithm: `auto` or `karmarkar_karp`.
    """

    _: KW_ONLY
    cost: str | None = None
    model: Model | None = None
    objective: str = "auto"
    algorithm: str = "auto"

    def cost_model(self, args: Any) -> CostModel:
        """The cost model for slime's arguments."""
        model = self.model
        if model is None and self.cost in (None, "flops"):
            spec = getattr(args, "spec", None) or [""]
            of_checkpoint = spec[0] in SPECS_DESCRIBED_BY_CHECKPOINT
            model = args.hf_checkpoint if of_checkpoint else ModelShape.from_megatron_args(args)
        return resolve_cost(self.cost, model=model, ep_size=_size(args, "expert_model_parallel_size"))


def topology_from_slime(args: Any, *, train_parallel_config: Mapping[str, int]) -> Topology:
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


def limits_from_slime(args: Any) -> Limits:
    """The limit of a micro-batch: tokens with dynamic batches, else a number of samples.

    Raises:
        BalanceError: dynamic batches have no cap.
    """
    if not args.use_dynamic_batch_size:
        return Limits(micro_batch_size=args.micro_batch_size)
    if args.max_tokens_per_gpu is None:
        raise BalanceError("--use-dynamic-batch-size is given and --max-tokens-per-gpu is not: give the cap in tokens.")
    return Limits(args.max_tokens_per_gpu)


def _size(args: Any, name: str, *, default: int = 1) -> int:
    return getattr(args, name, None) or default
