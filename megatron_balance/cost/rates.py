"""Costs by name, rates of attention and of links, and the split of layers that would even pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
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


def default_attention_rate(num_experts: int | None = None, *, fp8: bool = False) -> float:
    """The rate that training takes without `--balance-attention-rate`."""
    return ATTENTION_RATES["moe" if num_experts else "dense", "fp8" if fp8 else "bf16"]


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


def resolve_exchange(
    shape: ModelShape | Callable[[], ModelShape] | None,
    *,
    bytes_per_second: float,
    calibration: Calibration | None = None,
    tp_size: int = 1,
    tflops: float = ASSUMED_TFLOPS,
) -> tuple[dict[str, int], bool]:
    """Coefficients as of `exchange_costs`, and whether they were measured: by the run of `calibration`, or assumed.

    None of them where neither is known. A shape may be a function that reads it, where that is needed.
    """
    if calibration is not None:
        # The file is of all heads; each tensor-parallel rank receives its own.
        if measured := calibration.cost_model(model_parallel_size=tp_size).cp_exchange:
            return {"cp_exchange": measured}, True
        tflops = UNITS_PER_SECOND / 1e12 / tp_size  # FLOPs at the second rate are attoseconds
    if shape is None:
        return {}, False
    shape = shape if isinstance(shape, ModelShape) else shape()
    return exchange_costs(shape, bytes_per_second=bytes_per_second, tflops=tflops, tp_size=tp_size), False


def resolve_gather(
    options: Mapping[str, Any],
    *,
    shape: ModelShape | Callable[[], ModelShape],
    topology: Topology,
    calibration: Calibration | None = None,
    tflops: float = ASSUMED_TFLOPS,
) -> tuple[int, str]:
    """`CostModel.gather` of a model, and its bandwidth as text; 0 where Megatron's options gather no weights.

    A rank gathers its shard of the weights in every pass, two bytes each. Between nodes the ranks of a group on one
    node are assumed to share their links, eight of 400 Gb/s for eight GPUs (NVIDIA DGX H100 data sheet).

    Examples:
        >>> options, shape = {"use_torch_fsdp2": True}, ModelShape.preset("Qwen3-8B")
        >>> cost, text = resolve_gather(options, shape=shape, topology=Topology(64))
        >>> text, round(cost / fwd_flops(shape).linear)  # as long as the forward pass of so many tokens
        ('400 GB/s, assumed for 8 GPUs a node; --balance-fsdp-bandwidth sets it', 2000)
    """
    num_gathers = 0
    if options.get("use_torch_fsdp2"):
        num_gathers = 1 + bool(options.get("torch_fsdp2_reshard_after_forward", True))
    elif options.get("use_megatron_fsdp"):
        strategy = options.get("data_parallel_sharding_strategy", "optim_grads_params")
        num_gathers = 2 * (strategy == "optim_grads_params")
    if not num_gathers:
        return 0, ""
    if calibration is not None:
        tflops = UNITS_PER_SECOND / 1e12 / topology.tp_size
    model = shape if isinstance(shape, ModelShape) else shape()
    # A weight takes part in two FLOPs a token. Embeddings and the encoder of images are not counted.
    experts = fwd_flops(model).expert_linear // 2 * model.num_experts // max(model.moe_router_topk, 1)
    expert_ranks = topology.ep_size * topology.etp_size
    # Costs are those of all tensor-parallel ranks together.
    num_weights = fwd_flops(model).linear // 2 + experts * topology.tp_size // expert_ranks
    link = (options.get("balance_fsdp_bandwidth") or 0) * 1e9
    text = f"{link / 1e9:g} GB/s by --balance-fsdp-bandwidth"
    if not link:
        link = WITHIN_NODE
        if topology.num_gpus > GPUS_PER_NODE:
            link = min(BETWEEN_NODES * max(GPUS_PER_NODE // topology.tp_size, 1), WITHIN_NODE)
        text = f"{link / 1e9:g} GB/s, assumed for {GPUS_PER_NODE} GPUs a node; --balance-fsdp-bandwidth sets it"
    return round(num_gathers * 2 * num_weights * tflops * 1e12 / link), text


Model = ModelShape | Mapping[str, Any] | str | Path
"""A shape, the content of a Hugging Face config.json, its path or its folder's, or the name of a preset."""


def find_shape(model: Model) -> ModelShape:
    """The shape of a model, from a preset's name or a `config.json`."""
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping) or Path(model).suffix == ".json" or Path(model).is_dir():
        return ModelShape.from_hf_config(model)
    return ModelShape.preset(str(model))


def resolve_cost(
    cost: str | Calibration | None = None,
    *,
    model: Model | None = None,
    ep_size: int = 1,
    model_parallel_size: int = 1,
    attention_rate: float = 1.0,
    pack_tokens: int = 0,
    layout: PipelineLayout | None = None,
) -> CostModel:
    """Resolves `--cost`: `tokens`, `flops` or a seconds.json; by default flops where there is a model, else tokens.

    `model_parallel_size`, tensor- times context-parallel ranks, is for the seconds of a file, which are those of one;
    `attention_rate`, of attention over all else, and `pack_tokens` of a full pack for FLOPs. `layout` of the model's
    pipeline stages: seconds and tokens are shared among them as FLOPs are.
    """
    if cost is None:
        cost = "tokens" if model is None else "flops"
    if cost == "tokens":
        if layout is None or model is None:
            return CostModel.tokens()
        return replace(CostModel.tokens(), stages=CostModel.from_shape(find_shape(model), layout=layout).stages)
    if cost == "flops":
        if model is None:
            raise BalanceError(
                "the cost is flops, but the model is missing (--model): give the path of a Hugging Face config.json, "
                "or a preset (compare --help)."
            )
        return CostModel.from_shape(
            find_shape(model), ep_size=ep_size, attention_tflops=attention_rate, pack_tokens=pack_tokens, layout=layout
        )
    if isinstance(cost, str) and cost.endswith(".json"):
        cost = Calibration.read(Path(cost))
    if isinstance(cost, Calibration):
        stages = None
        if layout is not None and model is not None:
            stages = CostModel.from_shape(find_shape(model), ep_size=ep_size, layout=layout).stages
        seconds = cost.cost_model(ep_size=ep_size, model_parallel_size=model_parallel_size)
        return replace(seconds, stages=stages)
    raise BalanceError(f"the cost (--cost) is {cost!r}: it must be tokens, flops or the path of a seconds.json.")


def split_advice(
    layout: PipelineLayout, *, shape: ModelShape, lengths: Any, attention_rate: float = 1.0, pack_tokens: int = 0
) -> str:
    """A sentence on the costliest stage, and the flags that would even the stages; empty where none would pay."""

    def loads(layout: PipelineLayout) -> list[float]:
        model = resolve_cost(
            "flops", model=shape, attention_rate=attention_rate, pack_tokens=pack_tokens, layout=layout
        )
        return model.stages.loads(model, lengths) if model.stages else [1.0]

    current = loads(layout)
    splits = [(max(loads(split)), flags) for flags, split in layout.alternatives(shape).items()]
    # Of splits that are about as good the one that is simpler to say.
    best = min(
        splits, default=(max(current), ""), key=lambda split: (split[0] // SPLIT_GAIN, "|" in split[1], len(split[1]))
    )
    least, flags = best
    if max(current) < least + SPLIT_GAIN:
        return ""
    return (
        f"pipeline stage {current.index(max(current)) + 1} of {len(current)} computes {max(current):.2f} times the "
        f"mean; {flags} makes that {least:.2f}."
    )
