"""Small models and layers that layer_runs.py runs and the tests look at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape

DENSE = ModelShape(
    hidden_size=32,
    num_layers=2,
    num_attention_heads=4,
    num_query_groups=4,
    kv_channels=8,
    ffn_hidden_size=80,
    padded_vocab_size=96,
    gated_linear_unit=True,
)
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
}
SHAPES = {
    "dense": DENSE,
    "gqa": replace(DENSE, num_query_groups=2, gated_linear_unit=False, attention_output_gate=True),
    "moe": replace(DENSE, num_query_groups=2, **EXPERTS, moe_layer_freq=(0, 1)),
    "mla": replace(DENSE, **LATENT),
    "mla without q-LoRA": replace(DENSE, **LATENT | {"q_lora_rank": 0}, **EXPERTS),
    "mtp": replace(DENSE, mtp_num_layers=1),
}
LENGTHS = (32, 96)

LAYERS = {
    "attention": Layer("attention", "dense"),
    "window": Layer("attention", "dense", window=16),
    "moe": Layer("attention", "moe"),
    "mla": Layer("mla", "dense"),
    "mixer alone": Layer("attention", None),
    "mlp alone": Layer(None, "dense"),
    "experts alone": Layer(None, "moe"),
}
SEQUENCES = (50, 7, 200)
