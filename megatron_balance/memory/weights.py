"""Bytes of weights, gradients and optimizer state on one GPU.

Weights are counted from FLOPs: a matrix costs two a token and weight (the tests hold every preset against the real
model's weights), less the state of recurrent layers, which is not a weight. Norms are added, h a norm; biases are not.

The independent check is Megatron's `compute_weight_and_optimizer_memory` (megatron/training/
theoretical_memory_usage.py, 0.19); the tests pin where the two agree and where they do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_balance.memory.precision import Precision
from megatron_balance.model.flops import (
    dense_flops,
    mixer_flops,
    moe_flops,
    mtp_projection_flops,
)
from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Numbers of weights, by how ranks share them.

    Attributes:
        split: each tensor-parallel rank has its part.
        whole: every tensor-parallel rank has all of them: norms, routers, MLA's down projections.
        experts: each expert-parallel rank has its part.
    """

    split: int = 0
    whole: int = 0
    experts: int = 0

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            split=self.split + other.split, whole=self.whole + other.whole, experts=self.experts + other.experts
        )

    @property
    def total(self) -> int:
        """The sum of all."""
        return self.split + self.whole + self.experts


def layer_weights(shape: ModelShape, *, layer: Layer) -> Weights:
    """Weights of one layer.

    Args:
        shape: the model.
        layer: one of its layers.
    """
    h = shape.hidden_size
    weights = Weights(whole=h * sum(kind is not None for kind in (layer.mixer, layer.mlp)))
    if layer.mixer is not None:
        matrices = (mixer_flops(shape, layer=layer).linear - _state(shape, layer)) // 2
        whole = 0
        if layer.mixer in ("mla", "dsa"):
            whole = h * (shape.q_lora_rank + shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
            weights += Weights(whole=shape.q_lora_rank + shape.kv_lora_rank)  # the norms of the latent vectors
        weights += Weights(split=matrices - whole, whole=whole)
    if layer.mlp == "dense":
        weights += Weights(split=dense_flops(shape).linear // 2)
    elif layer.mlp == "moe":
        flops = moe_flops(shape)
        whole = h * shape.num_experts + 2 * h * shape.moe_latent_size
        weights += Weights(
            split=flops.linear // 2 - whole,
            whole=whole,
            experts=flops.expert_linear // (2 * shape.moe_router_topk) * shape.num_experts,
        )
    return weights


def embedding_weights(shape: ModelShape) -> Weights:
    """Weights of the embedding or of the output layer; both have one size."""
    return Weights(split=shape.hidden_size * shape.padded_vocab_size)


def mtp_weights(shape: ModelShape) -> Weights:
    """All multi-token-prediction depths: a layer, a projection and three norms each."""
    layers = sum((layer_weights(shape, layer=layer) for layer in shape.mtp_layers()), Weights())
    projection = mtp_projection_flops(shape).linear // 2
    return layers + Weights(split=shape.mtp_num_layers * projection, whole=3 * shape.mtp_num_layers * shape.hidden_size)


def weight_bytes(
    weights: Weights,
    *,
    topology: Topology,
    precision: Precision,
    distributed_optimizer: bool,
    gathered: Iterable[Weights] = (),
) -> int:
    """Bytes that weights, their gradients and the optimizer take on one GPU.

    The distributed optimizer shares its part among the ranks that hold the same weights, context parallelism included;
    full sharding (FSDP) shares all of it, and gathers layers as they run.

    Args:
        weights: of one pipeline stage.
        topology: the ranks.
        precision: bytes of a number.
        distributed_optimizer: `--use-distributed-optimizer`.
        gathered: under full sharding, the layers whose weights are whole at once.
    """
    replicas = topology.dp_size * topology.cp_size
    on_experts = topology.ep_size * topology.etp_size
    expert_replicas = max(replicas * topology.tp_size // on_experts, 1)

    def one(number: float, shared_by: int) -> float:
        kept = precision.weight + precision.gradient
        if topology.fully_sharded:
            return number * (kept + precision.optimizer) / shared_by
        return number * (kept + precision.optimizer / (shared_by if distributed_optimizer else 1))

    num_bytes = one(weights.split / topology.tp_size + weights.whole, replicas)
    num_bytes += one(weights.experts / on_experts, expert_replicas)
    if topology.fully_sharded:
        whole = [w.split / topology.tp_size + w.whole + w.experts / on_experts for w in gathered]
        num_bytes += precision.weight * sum(whole)
    return int(num_bytes) + 1


def _state(shape: ModelShape, layer: Layer) -> int:
    """Linear FLOPs of a recurrent layer that no weight accounts for."""
    if layer.mixer == "gated_delta_net":
        values = shape.linear_num_value_heads * shape.linear_value_head_dim
        return 8 * shape.linear_key_head_dim * values
    if layer.mixer == "mamba":
        return 7 * shape.mamba_num_heads * shape.mamba_head_dim * shape.mamba_state_dim
    return 0
