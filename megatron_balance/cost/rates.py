"""Costs by name, as an adapter asks for them and as the options of a run choose them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import exchange_numbers, fwd_flops
from megatron_balance.model.layout import PipelineLayout
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology

ATTENTION_RATES = {("dense", "bf16"): 0.6, ("dense", "fp8"): 0.4, ("moe", "bf16"): 2.0, ("moe", "fp8"): 2.0}
"""The rate of attention over the linear rate to plan with where none was measured, by kind of model and precision: what
loses least over all published rates of these (benchmarks/profiles.json, `scripts/bench rates`)."""

WITHIN_NODE = 450e9
"""Bytes a second that one GPU receives by NVLink: an H100 has 900 GB/s in both directions (NVIDIA H100 data sheet)."""

BETWEEN_NODES = 50e9
"""Bytes a second over one 400 Gb/s link a GPU."""

GPUS_PER_NODE = 8
"""An assumption, the same on all ranks."""

ASSUMED_TFLOPS = 400.0
"""Of an H100 in training, to compare a time with FLOPs where no rate is known: 40 % of its bf16 peak."""

SPLIT_GAIN = 0.03
"""Another split of layers is advised where the costliest stage loses so much of the mean."""

Model = ModelShape | Mapping[str, Any] | str | Path
"""A shape, the content of a Hugging Face config.json, its path or its folder's, or the name of a preset."""


def find_shape(model: Model) -> ModelShape:
    """The shape of a model, from a preset's name or a `config.json`."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping) or Path(model).suffix == ".json" or Path(model).is_dir():
        return ModelShape.from_hf_config(model)
    return ModelShape.preset(str(model))


def resolve_cost(cost: str | Calibration | None = None, *, model: Model | None = None, ep_size: int = 1) -> CostModel:
    """Resolves a cost's name: `tokens`, `flops` or a seconds.json; by default flops where there is a model.

    Seconds are those of the whole model on one rank.
    """
    if isinstance(cost, str) and cost.endswith(".json"):
        cost = Calibration.read(Path(cost))
    if isinstance(cost, Calibration):
        return cost.cost_model(ep_size=ep_size)
    if cost == "tokens" or (cost is None and model is None):
        return CostModel.tokens()
    if cost in (None, "flops") and model is not None:
        return CostModel.from_shape(find_shape(model), ep_size=ep_size)
    raise BalanceError(
        f"the cost (--cost) is {cost!r}: it must be tokens, the path of a seconds.json, or flops with a model "
        "(--model): a preset, or the path of a Hugging Face config.json."
    )


def assumed_link(topology: Topology) -> float:
    """Bytes a second between the ranks of the largest context-parallel group."""
    # Megatron numbers ranks with tensor parallelism innermost, then context, then data parallelism, and launchers put
    # consecutive ranks on a node.
    group = topology.tp_size * topology.dynamic_cp_sizes[-1]
    return BETWEEN_NODES if topology.num_gpus > GPUS_PER_NODE and GPUS_PER_NODE % group else WITHIN_NODE


def exchange_costs(
    shape: ModelShape, *, bytes_per_second: float, tflops: float = ASSUMED_TFLOPS, tp_size: int = 1
) -> dict[str, int]:
    """FLOPs in the time that a rank takes to receive what context-parallel ranks exchange for a token.

    By the names of a CostModel's coefficients, whose `summed_over_cp` counts what is not hidden of it. A GPU receives
    `bytes_per_second`, two bytes a number, and runs what is linear in tokens at `tflops`.

    Examples:
        >>> shape = ModelShape.preset("Qwen3-8B")
        >>> [exchange_costs(shape, bytes_per_second=link)["cp_exchange"] for link in (WITHIN_NODE, BETWEEN_NODES)]
        [393216000, 3538944000]
    """
    numbers = exchange_numbers(shape, shape.layers(), tp_size=tp_size)
    return {name: round(number * 2 * tflops * 1e12 / bytes_per_second) for name, number in numbers.items()}


def _gathered_weights(options: Mapping[str, Any], *, shape: ModelShape, topology: Topology) -> int:
    """Weights that FSDP gathers in a pass on all tensor-parallel ranks, without embeddings; 0 where it gathers none."""
    strategy = options.get("data_parallel_sharding_strategy", "optim_grads_params")
    is_sharded = options.get("use_megatron_fsdp") and strategy == "optim_grads_params"
    if not (is_sharded or options.get("use_torch_fsdp2")):
        return 0
    # A weight takes part in two FLOPs a token, an expert's in those of the tokens that visit it.
    flops = fwd_flops(shape)
    experts = flops.expert_linear // 2 * shape.num_experts // max(shape.moe_router_topk, 1)
    return flops.linear // 2 + experts * topology.tp_size // (topology.ep_size * topology.etp_size)


@dataclass(frozen=True)
class RunCosts:
    """The cost of a sample: tokens, the FLOPs of its model, or measured seconds; lines for the log.

    `attention_rate` is that which FLOPs are weighed by, None for other costs.
    """

    model: CostModel
    name: str = "tokens"
    attention_rate: float | None = None
    log_lines: tuple[str, ...] = field(default=(), repr=False)


def run_costs(
    options: Mapping[str, Any],
    *,
    topology: Topology,
    shape: Callable[[], ModelShape],
    cost: CostModel | None = None,
    calibration: Calibration | None = None,
    tflops: float = ASSUMED_TFLOPS,
) -> RunCosts:
    """The costs that Megatron's options and the balance flags choose.

    `cost` is one in place of FLOPs, `calibration` one in place of what `--balance-cost` names. FLOPs are those of all
    ranks of a replica, or with dynamic context-parallel sizes of all tensor-parallel ranks; seconds are of each rank.
    `tflops` of what is linear compare a time with FLOPs.
    """
    choice = options.get("balance_cost") or "tokens"
    if calibration is None and choice not in ("tokens", "flops") and choice.partition(":")[0] != "auto":
        calibration = Calibration.read(Path(choice))
    # Costs that are given are complete, but for what dynamic sizes add.
    receives = topology.dynamic_cp or (topology.cp_size > 1 and cost is None)
    name, rate, model, log_lines = "flops", None, None, list[str]()
    if calibration is not None:
        name, cost = "seconds", calibration.cost_model(ep_size=topology.ep_size)
        tflops = UNITS_PER_SECOND / 1e12  # FLOPs at this rate take attoseconds
    elif choice == "tokens":
        name, cost = "tokens", CostModel.tokens()
        if topology.dynamic_cp or topology.fully_sharded:
            log_lines.append("Tokens do not count what a rank receives from others: add --balance-cost flops.")
    if cost is None:
        model, rate = shape(), options.get("balance_attention_rate")
        if rate is None:
            rate = ATTENTION_RATES["moe" if model.num_experts else "dense", "fp8" if options.get("fp8") else "bf16"]
        log_lines.append(f"FLOPs count attention at {rate:g} times the rate of all else (--balance-attention-rate).")
        cost = CostModel.from_shape(
            model,
            ep_size=topology.ep_size,
            attention_tflops=rate,
            layout=layout_of(options, topology=topology, shape=model),
        )
    else:
        with suppress(BalanceError):  # where FLOPs are not known, stages take equal parts
            model = shape()
            layout, ep_size = layout_of(options, topology=topology, shape=model), topology.ep_size
            flops = CostModel.from_shape(model, ep_size=ep_size if cost.expert_linear else 1, layout=layout)
            cost = replace(cost, stages=cost.stages or flops.stages)
    if name == "tokens":
        return RunCosts(cost, name, log_lines=tuple(log_lines))
    if model is not None and receives and not cost.cp_exchange:
        link = assumed_link(topology)
        cost = replace(cost, **exchange_costs(model, bytes_per_second=link, tflops=tflops, tp_size=topology.tp_size))
        log_lines.append(
            f"Context-parallel ranks receive {link / 1e9:g} GB/s, an assumption; megatron-balance fit measures it in a "
            "run with --balance-dynamic-cp."
        )
    if (
        model is not None
        and not cost.gather
        and (num_weights := _gathered_weights(options, shape=model, topology=topology))
    ):
        # Ranks of a group on one node share its links to others, eight of 400 Gb/s (NVIDIA DGX H100 data sheet).
        link = min(BETWEEN_NODES * max(GPUS_PER_NODE // topology.tp_size, 1), WITHIN_NODE)
        link = link if topology.num_gpus > GPUS_PER_NODE else WITHIN_NODE
        # In both passes, two bytes each.
        cost = replace(cost, gather=round(2 * 2 * num_weights * tflops * 1e12 / link))
        log_lines.append(f"FSDP gathers weights in every micro-batch at {link / 1e9:g} GB/s, an assumption.")
    if calibration is not None:
        cost = cost.of_rank(tp_size=topology.tp_size, cp_size=1 if topology.dynamic_cp else topology.cp_size)
    elif not topology.dynamic_cp:
        cost = cost.summed_over_cp(topology.cp_size)
    return RunCosts(cost, name, rate, tuple(log_lines))


def layout_of(options: Mapping[str, Any], *, topology: Topology, shape: ModelShape) -> PipelineLayout | None:
    """The split of layers that the options choose, else as many on every stage; None for one stage."""
    stages, chunks = topology.pp_size, topology.vpp_size
    if stages == 1:
        return None
    sizes = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": chunks}
    layout = PipelineLayout.from_options({**options, **sizes}, shape=shape)
    if layout is None or len(layout.num_layers) != stages * chunks:
        return PipelineLayout.even_split(shape.num_layers, pp_size=stages, vpp_size=chunks)
    return layout


def split_advice(layout: PipelineLayout | None, *, shape: ModelShape, lengths: Any, attention_rate: float = 1.0) -> str:
    """A sentence on the costliest stage, and the flag that would even the stages; empty where none would pay."""

    def loads(layout: PipelineLayout) -> list[float]:
        model = CostModel.from_shape(shape, attention_tflops=attention_rate, layout=layout)
        return model.stages.loads(model, lengths) if model.stages else [1.0]

    if layout is None:
        return ""
    current = loads(layout)
    largest = max(current)
    least, flag = min(
        ((max(loads(split)), flag) for flag, split in layout.alternatives(shape).items()), default=(largest, "")
    )
    if largest < least + SPLIT_GAIN:
        return ""
    return (
        f"pipeline stage {current.index(largest) + 1} of {len(current)} computes {largest:.2f} times the mean; {flag} "
        f"makes that {least:.2f}."
    )
