"""Resolves `--cost` and `--model` to a CostModel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.model import MICROBATCH_TOKENS, CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.model.presets import PRESETS
from megatron_balance.model.shape import ModelShape

Model = ModelShape | Mapping[str, Any] | str | Path
"""A shape, the content of a Hugging Face config.json, its path or its folder's, or the name of a preset."""


def find_shape(model: Model, *, named_by: str = "the model (--model)") -> ModelShape:
    """The shape of a model, from a preset's name or a `config.json`.

    Args:
        model: its name, its configuration, or the shape itself.
        named_by: the flag, for messages.

    Raises:
        BalanceError: there is no such preset and no such file, or the file is not understood.
    """
    if isinstance(model, ModelShape):
        return model
    if isinstance(model, Mapping):
        return ModelShape.from_hf_config(model)
    path = Path(model)
    if path.suffix == ".json" or path.is_dir():
        return ModelShape.from_hf_config(path)
    if str(model).lower() in {preset.lower() for preset in PRESETS}:
        return ModelShape.preset(str(model))
    raise BalanceError(
        f"{named_by} is {str(model)!r}: it must be the path of a Hugging Face config.json, or one of "
        f"{', '.join(PRESETS)}."
    )


def resolve_cost(
    cost: str | None = None,
    *,
    model: Model | None = None,
    ep_size: int = 1,
    model_parallel_size: int = 1,
    attention_rate: float = 1.0,
) -> CostModel:
    """Resolves the value of `--cost`.

    Args:
        cost: `tokens`, `flops`, or the path of a seconds.json; by default flops where there is a model, else
            tokens.
        model: the model that FLOPs are of.
        ep_size: expert-parallel ranks, which share the work of routed experts.
        model_parallel_size: tensor- times context-parallel ranks, for the seconds of a file, which are those of one.
        attention_rate: of FLOPs: the rate of attention over that of all else; 1 counts FLOPs as they are.

    Raises:
        BalanceError: FLOPs without a model, or another value.
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
