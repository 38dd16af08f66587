"""Describes a layer for FLOPs: a token mixer, an MLP, and the sizes that each requires."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Mixer = Literal["attention", "mla", "dsa", "dsa_shared", "gated_delta_net", "mamba"]
Mlp = Literal["dense", "moe"]


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        mixer: what mixes tokens; None in a hybrid model's MLP layer. `dsa_shared` is sparse attention to the keys that
            an earlier layer's indexer picked.
        mlp: what follows it; None in a hybrid model's mixer layer.
        window: tokens a query attends to, itself included; 0 where it attends to all before it. The keys that
            sparse attention picks are not a window: `ModelShape.dsa_indexer_topk` says how many.
    """

    mixer: Mixer | None
    mlp: Mlp | None
    window: int = 0


HYBRID_LAYERS: dict[str, tuple[Mixer | None, Mlp | None]] = {
    "*": ("attention", None),
    "+": ("mla", None),
    "D": ("dsa", None),
    "G": ("gated_delta_net", None),
    "M": ("mamba", None),
    "-": (None, "dense"),
    "E": (None, "moe"),
}
"""Megatron's symbols (megatron.core.models.hybrid.hybrid_layer_allocation)."""

_LATENT = ("kv_lora_rank", "qk_head_dim", "v_head_dim")

NEEDED: dict[str, tuple[str, ...]] = {
    "mla": _LATENT,
    "dsa_shared": (*_LATENT, "dsa_indexer_topk"),
    "dsa": (*_LATENT, "dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    "gated_delta_net": (
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_conv_kernel_dim",
    ),
    "mamba": ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
    "dense": ("ffn_hidden_size",),
    "moe": ("num_experts", "moe_router_topk", "moe_ffn_hidden_size"),
}
"""Sizes that each kind of layer requires."""
