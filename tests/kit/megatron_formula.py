"""Megatron's own count of a model's FLOPs, `num_floating_point_operations`, for a ModelShape.

It is linear in the tokens and in the squared lengths of a batch, so (1 token, 0 squares) gives its linear coefficient
and (0, 1) its quadratic one, times 3 for the backward pass.
"""

from argparse import Namespace
from dataclasses import asdict


def megatron_flops(shape):
    """Its forward FLOPs per token and per squared token."""
    from megatron.training import training

    args = _arguments(shape)
    linear, quadratic = (
        training.num_floating_point_operations(
            args, 1, seqlen_squared_sum_in_batch=squares, total_real_tokens_in_batch=1 - squares
        )
        for squares in (0, 1)
    )
    return linear / 3, quadratic / 3


def _arguments(shape):
    """The arguments that the formula reads."""
    args = asdict(shape)
    optional = ("num_experts", "moe_latent_size", "q_lora_rank", "hybrid_layer_pattern", "mtp_num_layers")
    args |= {name: args[name] or None for name in optional}
    args["moe_layer_freq"] = list(shape.moe_layer_freq) or 1
    args["linear_attention_freq"] = list(shape.linear_attention_freq) or None
    variant = "dsa" if shape.dsa_indexer_topk else None
    args["experimental_attention_variant"] = "gated_delta_net" if shape.linear_attention_freq else variant
    args["group_query_attention"] = not shape.multi_latent_attention
    args["swiglu"] = shape.gated_linear_unit
    args["quick_geglu"] = False
    return Namespace(**args)
