"""Sizes of a model, and the FLOPs and weights that follow from them."""

from megatron_balance.model.flops import (
    FlopsPolynomial,
    Layer,
    calculate_fwd_flops,
    causal_pairs,
    fwd_flops,
    fwd_flops_by_part,
    image_flops,
    num_parameters,
)
from megatron_balance.model.hf_config import FAMILIES, PRESETS, ROWS
from megatron_balance.model.shape import ModelShape
from megatron_balance.model.vision import VisionEncoder, patches_of_grids

__all__ = [
    "FAMILIES",
    "PRESETS",
    "ROWS",
    "FlopsPolynomial",
    "Layer",
    "ModelShape",
    "VisionEncoder",
    "calculate_fwd_flops",
    "causal_pairs",
    "fwd_flops",
    "fwd_flops_by_part",
    "image_flops",
    "num_parameters",
    "patches_of_grids",
]
