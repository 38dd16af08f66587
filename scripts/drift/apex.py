"""Definitions of Apex that Megatron calls on a balanced micro-batch, whose number of tokens changes.

Its compiled extensions (amp_C, fused_weight_gradient_mlp_cuda) are not read here.
"""

from __future__ import annotations

from drift.relied import Relied

APEX = (
    Relied(
        "apex.normalization.fused_layer_norm:FusedLayerNormAffineFunction.forward",
        "normalises tokens without a fixed shape",
        parameters=("input", "weight", "bias", "normalized_shape", "eps", "memory_efficient"),
        first=(0, 0),
        body=True,
    ),
    Relied(
        "apex.contrib.layer_norm.layer_norm:FastLayerNormFN.forward",
        "normalises tokens without a fixed shape (--no-persist-layer-norm turns it off)",
        first=(0, 0),
        body=True,
    ),
    Relied(
        "apex.multi_tensor_apply.multi_tensor_apply:MultiTensorApply.__call__",
        "sums gradient norms",
        parameters=("op", "noop_flag_buffer", "tensor_lists"),
        first=(0, 0),
    ),
    Relied(
        "apex.optimizers.fused_adam:FusedAdam",
        "is the optimizer where Transformer Engine has none",
        parameters=("params", "lr", "betas", "eps", "weight_decay"),
        first=(0, 0),
    ),
)
