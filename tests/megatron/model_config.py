"""Converts a ModelShape to Megatron's configuration and layer specs, to run the model's own layers alone.

    stack = shape.stack_of(layer, num_layers=2)
    config = transformer_config_of(stack)
    block = TransformerBlock(config, block_spec_of(config, layers=stack.decoder_layers()))

Settings without FLOPs have values that run everywhere: no dropout, no bias, RMSNorm, rotary angles not fused.
Where Transformer Engine is installed layers are its own, elsewhere Megatron's local ones with `ThdAttention`.

Invariants: `ModelShape.from_transformer_config` of `transformer_config_of(shape)`, given the vocabulary and the
hybrid pattern, which a configuration does not hold, is shape again; a kind of layer that cannot be built here is
refused, never replaced by another.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules

from megatron_balance.errors import BalanceError
from megatron_balance.mcore.thd.attention import build_norm, thd_layer_spec
from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape

_NEEDS: dict[str, str] = {
    "dsa": "Transformer Engine and fast-hadamard-transform",
    "gated_delta_net": "Transformer Engine and flash-linear-attention",
    "mamba": "Transformer Engine, mamba-ssm and causal-conv1d",
}
"""Mixers that Megatron builds from kernels of other packages only."""


def transformer_config_of(
    shape: ModelShape,
    *,
    num_layers: int | None = None,
    params_dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    **overrides: Any,
) -> TransformerConfig:
    """Megatron's configuration of a model of this shape.

    Args:
        shape: the model.
        num_layers: only the first num_layers layers; all by default.
        params_dtype: type of weights and activations.
        recompute: every layer is recomputed in the backward pass (`--recompute-granularity full`).
        **overrides: further fields of TransformerConfig, such as `qk_layernorm=True`.

    Returns:
        TransformerConfig: MLATransformerConfig where attention is multi-latent.

    Raises:
        BalanceError: num_layers is not between 1 and the shape's.
    """
    count = shape.num_layers if num_layers is None else num_layers
    if not 1 <= count <= shape.num_layers:
        raise BalanceError(f"num_layers is {num_layers}: it must be between 1 and the shape's {shape.num_layers}.")
    fields: dict[str, Any] = {
        "num_layers": count,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.kv_channels,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "gated_linear_unit": shape.gated_linear_unit,
        "activation_func": torch.nn.functional.silu,
        "attention_output_gate": shape.attention_output_gate,
        "mtp_num_layers": shape.mtp_num_layers or None,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "gradient_accumulation_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }
    if shape.num_experts:
        fields |= _expert_fields(shape, count)
    if shape.window_size is not None:
        fields["window_size"] = shape.window_size
        fields["window_attn_skip_freq"] = list(shape.window_attn_skip_freq[:count]) or None
    if shape.linear_attention_freq:
        fields["experimental_attention_variant"] = "gated_delta_net"
        fields["linear_attention_freq"] = list(shape.linear_attention_freq[:count])
    if shape.linear_attention_freq or "G" in shape.hybrid_layer_pattern:
        names = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")
        fields |= {f"linear_{name}": getattr(shape, f"linear_{name}") for name in names}
    if shape.dsa_indexer_topk:
        names = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
        fields |= {name: getattr(shape, name) for name in names}
        if not shape.hybrid_layer_pattern:
            fields["experimental_attention_variant"] = "dsa"
    if shape.hybrid_layer_pattern:
        fields["is_hybrid_model"] = True
    if "M" in shape.hybrid_layer_pattern:
        names = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
        fields |= {name: getattr(shape, name) for name in names}
    if recompute:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if not (shape.multi_latent_attention or any(layer.mixer in ("mla", "dsa") for layer in shape.decoder_layers())):
        return TransformerConfig(**(fields | overrides))
    fields |= {
        "multi_latent_attention": True,
        "q_lora_rank": shape.q_lora_rank or None,
        "kv_lora_rank": shape.kv_lora_rank,
        "qk_head_dim": shape.qk_head_dim,
        "qk_pos_emb_head_dim": shape.qk_pos_emb_head_dim,
        "v_head_dim": shape.v_head_dim,
        "rope_type": "rope",
    }
    return MLATransformerConfig(**(fields | overrides))


def _expert_fields(shape: ModelShape, num_layers: int) -> dict[str, Any]:
    return {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.moe_router_topk,
        "moe_ffn_hidden_size": shape.moe_ffn_hidden_size,
        "moe_shared_expert_intermediate_size": shape.moe_shared_expert_intermediate_size or None,
        "moe_latent_size": shape.moe_latent_size or None,
        "moe_layer_freq": list(shape.moe_layer_freq[:num_layers]) or 1,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
        # One kernel for all experts of a rank; Megatron has it through Transformer Engine only.
        "moe_grouped_gemm": HAVE_TE,
    }


def layer_spec_of(config: TransformerConfig, *, layer: Layer) -> ModuleSpec:
    """The spec of one layer, for packed (thd) sequences.

    Args:
        config: the model's configuration.
        layer: the kind. Its window is not read: Megatron takes it from the configuration and the layer's number.

    Raises:
        BalanceError: Megatron cannot build this kind here.
    """
    if layer.mixer in _NEEDS:
        raise BalanceError(
            f"A {layer.mixer} layer cannot be built alone: Megatron needs {_NEEDS[layer.mixer]} for it. Take its "
            "FLOPs, or the times of a real run."
        )
    options: dict[str, Any] = {
        "num_experts": config.num_moe_experts if layer.mlp == "moe" else None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": layer.mixer == "mla",
    }
    if HAVE_TE:
        spec = get_gpt_layer_with_transformer_engine_spec(**options)
    else:
        spec = thd_layer_spec(get_gpt_layer_local_spec(**options, normalization=config.normalization))
    return _without_missing_half(spec, layer)


def block_spec_of(config: TransformerConfig, *, layers: Iterable[Layer]) -> TransformerBlockSubmodules:
    """The spec of a block of layers, for packed (thd) sequences.

    Args:
        config: the model's configuration.
        layers: `[config.num_layers]` kinds, `ModelShape.decoder_layers()`.

    Raises:
        BalanceError: Megatron cannot build one of the kinds here, or their number is not the configuration's.
    """
    kinds = tuple(layers)
    if len(kinds) != config.num_layers:
        raise BalanceError(f"layers holds {len(kinds)} kinds: the configuration has num_layers {config.num_layers}.")
    specs = {kind: layer_spec_of(config, layer=kind) for kind in dict.fromkeys(kinds)}
    return TransformerBlockSubmodules(layer_specs=[specs[kind] for kind in kinds], layer_norm=build_norm)


def _without_missing_half(spec: ModuleSpec, layer: Layer) -> ModuleSpec:
    """A hybrid model's layer is a mixer or an MLP; TransformerLayer does nothing for the other half."""
    if layer.mixer is not None and layer.mlp is not None:
        return spec
    spec = copy.deepcopy(spec)
    nothing = TransformerLayerSubmodules()
    missing = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    if layer.mixer is None:
        missing = ("input_layernorm", "self_attention", "self_attn_bda")
    for name in missing:
        setattr(spec.submodules, name, getattr(nothing, name))
    return spec
