"""Resolves `--cost` and `--model` to a CostModel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.hf_config import PRESETS
from megatron_balance.model.shape import ModelShape

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
    cost: str | None = None,
    *,
    model: Model | None = None,
    ep_size: int = 1,
    model_parallel_size: int = 1,
    attention_rate: float = 1.0,
) -> CostModel:
    """Resolves `--cost`: `tokens`, `flops` or a seconds.json; by default flops where there is a model, else tokens.

    `model_parallel_size`, tensor- times context-parallel ranks, is for the seconds of a file, which are those of one;
    `attention_rate`, of attention over all else, for FLOPs.
    """
    if cost is None:
        cost = "tokens" if model is None else "flops"
    if cost == "tokens":
        return CostModel.tokens()
    if cost == "flops":
        if model is None:
            raise BalanceError(
                "the cost is flops, but the model is missing (--model): give the path of a Hugging Face config.json, "
                f"or one of {', '.join(PRESETS)}."
            )
        return CostModel.from_shape(
            find_shape(model),
            ep_size=ep_size,
            microbatch_tokens=MICROBATCH_TOKENS,
            attention_tflops=attention_rate,
        )
    if cost.endswith(".json"):
        return Calibration.read(Path(cost)).cost_model(ep_size=ep_size, model_parallel_size=model_parallel_size)
    raise BalanceError(f"the cost (--cost) is {cost!r}: it must be tokens, flops or the path of a seconds.json.")
