"""Computes the work of a row in verl's units: squared tokens plus a factor times tokens.

verl's factor, 24576, is that of a 7B model of hidden size 4096, whatever the model. Here it comes from the model:
forward and backward FLOPs per token over those per squared token, as `CostModel.from_shape` counts them.

    Qwen2.5-0.5B 19689   Qwen3-8B 43992   Qwen3-30B-A3B 13261   Qwen2.5-72B 93460

Images add the time of the model's vision encoder, which runs on the row's rank before its tokens.

Invariants: workloads are int64 and the unit depends on the model alone, so that numbers from two calls can be added
and compared; a row that costs anything has a workload of at least 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.adapters.processor_images import counted_encoder, image_costs
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape
from megatron_balance.model.vision import VisionEncoder
from megatron_balance.planner import Images

if TYPE_CHECKING:
    import torch

Model = Any
"""A preset's name, the path of a Hugging Face config.json or its folder, its content, a `PretrainedConfig` (the
`hf_config` of verl's HFModelConfig), a ModelShape, or `{"mlp_workload_factor": 24576}`."""

VERL_FACTOR = 24576
"""verl's `calculate_workload`: `24576 * seqlen + seqlen**2` (verl 0.9.1, verl/utils/seqlen_balancing.py)."""

FACTOR_KEY = "mlp_workload_factor"
"""The key that the review of verl's `_balance_data_proto` asked for, in a `model_config`."""


def choose_workload(model: Model | None = None, *, cost: str | None = None) -> CostModel:
    """The cost model of a verl run.

    Args:
        model: model whose FLOPs count; None for verl's own formula, or for tokens.
        cost: `flops`, `tokens` or the path of a seconds.json; by default flops where there is a model.

    Raises:
        BalanceError: the model or the cost is not known, or the factor is not a positive integer.
    """
    model = _content(model)
    if isinstance(model, Mapping) and FACTOR_KEY in model and cost is None:
        factor = model[FACTOR_KEY]
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 0:
            raise BalanceError(f"{FACTOR_KEY} is {factor!r}: it must be an integer of at least 0.")
        return CostModel(linear=factor, quadratic=1)
    if model is None and cost is None:
        return CostModel(linear=VERL_FACTOR, quadratic=1)
    if model is not None and not isinstance(model, (str, Path, Mapping, ModelShape)):
        raise BalanceError(
            f"the model is a {type(model).__name__}: it must be a name, a path, or the content of a config.json."
        )
    return resolve_cost(cost, model=model)


def choose_encoder(model: Model | None, *, cost_model: CostModel) -> VisionEncoder | None:
    """The vision encoder of a model that `choose_workload` took, if images cost anything."""
    return counted_encoder(_content(model), cost_model=cost_model)


def _content(model: Model | None) -> Model | None:
    """The content of a `PretrainedConfig`; other models as they are."""
    to_dict = getattr(model, "to_dict", None)
    return model if to_dict is None else to_dict()


def workloads(lengths: NDArray[np.int64], *, cost_model: CostModel, images: Images | None = None) -> NDArray[np.int64]:
    """Work of rows.

    Args:
        lengths: `[num_rows]` tokens.
        cost_model: what a row costs.
        images: of the rows; None for no images.

    Returns:
        `[num_rows]` int64, in units of the cost of one squared token; of one token where there is no attention.
    """
    unit = cost_model.quadratic or sum(coefficient for _, coefficient in cost_model.windows) or cost_model.linear or 1
    unique, inverse = np.unique(lengths, return_inverse=True)
    # Python integers: FLOPs of a long row of a large model approach the limit of int64.
    costs = [cost_model(length) + cost_model.expert_linear * length for length in unique.tolist()]
    places = inverse.reshape(lengths.shape)
    if images is not None:
        rows = zip(places, image_costs(images, cost_model=cost_model), strict=True)
        costs = [costs[place] + of_images for place, of_images in rows]
        places = np.arange(lengths.size)
    in_units = [max((2 * cost + unit) // (2 * unit), 1) if cost else 0 for cost in costs]
    return np.array(in_units, dtype=np.int64)[places]


def tensor_workloads(seqlens: torch.Tensor | Sequence[int], *, cost_model: CostModel) -> torch.Tensor:
    """Replaces verl's `calculate_workload`.

    Args:
        seqlens: lengths as a list or a tensor of any dtype (verl's SFT trainer gives float32), or a nested tensor of
            the rows themselves.
        cost_model: what a row costs.

    Returns:
        int64 tensor of the lengths' shape, on their device; `[num_rows]` for a nested tensor.
    """
    import torch

    if isinstance(seqlens, torch.Tensor):
        lengths = nested_lengths(seqlens) if seqlens.is_nested else seqlens.long()
    else:
        lengths = torch.tensor([int(length) for length in seqlens], dtype=torch.int64)
    values = workloads(lengths.cpu().numpy(), cost_model=cost_model)
    return torch.from_numpy(values).to(lengths.device)


def nested_lengths(rows: torch.Tensor) -> torch.Tensor:
    """Tokens of each row of a nested tensor, jagged or strided: int64 `[num_rows]`."""
    import torch

    if rows.layout == torch.jagged:
        jagged: Any = rows
        return jagged.offsets().diff().long()
    sizes = [row.shape[0] for row in rows.unbind()]
    return torch.tensor(sizes, dtype=torch.int64, device=rows.device)
