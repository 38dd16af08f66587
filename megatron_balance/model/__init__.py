"""Sizes of a model, and the FLOPs and weights that follow from them."""

from megatron_balance.model.flops import (
    FlopsPolynomial,
    calculate_fwd_flops,
    causal_pairs,
    fwd_flops,
    fwd_flops_by_part,
    linear_coefficient,
    num_parameters,
)
from megatron_balance.model.hf_config import FAMILIES
from megatron_balance.model.layers import Layer
from megatron_balance.model.megatron_args import parse_layer_pattern
from megatron_balance.model.presets import PRESETS, ROWS
from megatron_balance.model.shape import ModelShape
from megatron_balance.model.vision import VisionEncoder, image_flops, patches_of_grids

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
    "linear_coefficient",
    "num_parameters",
    "parse_layer_pattern",
    "patches_of_grids",
]
