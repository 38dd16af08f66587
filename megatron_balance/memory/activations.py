"""Tensors that a layer keeps for its backward pass, in bytes per token of a GPU.

The list follows Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv
2205.05198), section 4, equations 1 to 4, with later changes: flash attention keeps q, k, v, its output and
one fp32 logsumexp a head, no L² term; grouped keys and values; a gated MLP keeps both halves of its first GEMM; norms
keep their input and output; the projection of q, k and v stays whole beside the rotated q and k, since v is a view of
it. It is what Megatron's fused Transformer Engine layers keep; `fused=False` adds what its local layers of torch
operations keep beside that, as they run on a CPU.

A tensor is kept once by each tensor-parallel rank (`tensor`: split over heads or channels), whole on every rank unless
sequence parallelism splits its tokens (`sequence`), by the tokens routed to a rank's experts (`experts`), or by these
and the experts' own tensor parallelism (`expert_channels`).

Not counted: masks and offsets of routing, communication buffers. Gated delta
net and Mamba layers are estimates from the arguments their kernels save; nothing here measures them.

Symbols: h hidden_size, b bytes of an activation, n heads, d channels a head, f ffn_hidden_size, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

from megatron_balance.memory.precision import Precision
from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape
from megatron_balance.topology import Topology

Split = Literal["tensor", "sequence", "experts", "expert_channels"]

RECOMPUTED_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
"""Megatron's --recompute-modules that save memory here; gdn_norm_out is not modelled."""


@dataclass(frozen=True)
class Kept:
    """One tensor that is kept.

    Attributes:
        what: its name, for people.
        num_bytes: for each token of the micro-batch, before any split.
        split: how parallel ranks share it.
        recomputed_by: the --recompute-modules that drop it.
    """

    what: str
    num_bytes: float
    _: KW_ONLY
    split: Split = "tensor"
    recomputed_by: tuple[str, ...] = ()


def kept_by_layer(shape: ModelShape, *, layer: Layer, precision: Precision) -> tuple[Kept, ...]:
    """Everything a layer keeps without recomputation.

    Args:
        shape: the model.
        layer: one of its layers.
        precision: bytes of a number.
    """
    kept: list[Kept] = []
    for part in ("mixer", "mlp"):
        kind = getattr(layer, part)
        if kind is None:
            continue
        kept += norm_kept(shape, what=f"{part} norm", precision=precision)
        kept += _PARTS[kind](shape, precision)
        if precision.hidden_dropout:
            kept.append(Kept(f"{part} dropout mask", shape.hidden_size, split="sequence"))
    return tuple(kept)


def bytes_per_token(
    kept: Iterable[Kept], *, topology: Topology, recompute_modules: frozenset[str], expert_imbalance: float
) -> float:
    """Bytes of tensors on one GPU, per token of that GPU.

    Args:
        kept: the tensors.
        topology: the ranks.
        recompute_modules: what is recomputed (`--recompute-granularity selective`); empty for nothing.
        expert_imbalance: tokens of the fullest expert rank over the mean; counted where expert ranks share tokens.
    """
    tp = topology.tp_size
    imbalance = expert_imbalance if topology.ep_size > 1 else 1.0
    over = {
        "tensor": 1 / tp,
        "sequence": 1 / tp if topology.sequence_parallel else 1.0,
        # Each of the tp ranks routes its own 1/tp of the tokens; a group of etp ranks gathers them again.
        "experts": topology.etp_size / tp * imbalance,
        "expert_channels": imbalance / tp,
    }
    return sum(
        tensor.num_bytes * over[tensor.split] for tensor in kept if recompute_modules.isdisjoint(tensor.recomputed_by)
    )


def backward_workspace(shape: ModelShape, *, layer: Layer, precision: Precision) -> tuple[Kept, ...]:
    """Gradients that live at once while a layer runs backward: of its widest GEMM, its product and the residual.

    Args:
        shape: the model.
        layer: one of its layers.
        precision: bytes of a number.
    """
    b, h, halves = precision.activation, shape.hidden_size, 2 if shape.gated_linear_unit else 1
    gradients = [Kept("gradient of the residual", 2 * b * h, split="sequence")]
    if layer.mlp == "dense":
        gradients.append(Kept("gradients in the MLP", (halves + 1) * b * shape.ffn_hidden_size))
    elif layer.mlp == "moe":
        width = shape.moe_latent_size or h
        routed = b * shape.moe_router_topk
        gradients.append(Kept("gradients of routed tokens", routed * width, split="experts"))
        channels = routed * (halves + 1) * shape.moe_ffn_hidden_size
        gradients.append(Kept("gradients in the experts", channels, split="expert_channels"))
    else:
        gradients.append(Kept("gradients in the mixer", 2 * b * _mixer_width(shape, layer)))
    return tuple(gradients)


def _mixer_width(shape: ModelShape, layer: Layer) -> int:
    if layer.mixer in ("mla", "dsa"):
        return shape.num_attention_heads * (2 * (shape.qk_head_dim + shape.qk_pos_emb_head_dim) + shape.v_head_dim)
    return (shape.num_attention_heads + 2 * shape.num_query_groups) * shape.kv_channels


def norm_kept(shape: ModelShape, *, what: str, precision: Precision) -> tuple[Kept, ...]:
    """Input and output of a norm, 2bh, and its statistic; the output is the input of the GEMMs that follow.

    Args:
        shape: the model.
        what: its name.
        precision: bytes of a number.
    """
    width = precision.activation * shape.hidden_size
    kept = (
        Kept(f"{what}, input and statistic", width + 4, split="sequence"),
        Kept(f"{what}, output", width, split="sequence", recomputed_by=("layernorm",)),
    )
    return kept if precision.fused else (*kept, Kept(f"{what}, before its weight", width, split="sequence"))


def _attention(shape: ModelShape, precision: Precision) -> list[Kept]:
    """Projection b(nd + 2gd), rotated q and k b(nd + gd), output bnd, logsumexp 4n; with an output gate 2bnd.

    QK norm keeps q and k once more. The projection counts as kept since v, a view, holds it.
    """
    b = precision.activation
    queries, keys = shape.num_attention_heads * shape.kv_channels, shape.num_query_groups * shape.kv_channels
    kept = [
        Kept("q, k, v", b * (queries + 2 * keys)),
        Kept("rotated q, k", b * (queries + keys)),
        Kept("attention output", b * queries),
        Kept("logsumexp", 4 * shape.num_attention_heads, recomputed_by=("core_attn",)),
    ]
    if precision.qk_layernorm:
        kept.append(Kept("q, k before their norm", b * (queries + keys)))
    if shape.attention_output_gate:
        kept.append(Kept("output gate and gated output", 2 * b * queries))
    if not precision.fused:
        kept.append(Kept("sines and cosines", 4 * b * shape.kv_channels, split="sequence"))
    return kept


def _latent_attention(shape: ModelShape, precision: Precision) -> list[Kept]:
    """Latent vectors before and after their norms, then q, k, v of all heads uncompressed.

    The down projections are not split over tensor-parallel ranks (`parallel_mode` duplicated).
    """
    b, n = precision.activation, shape.num_attention_heads
    qk = shape.qk_head_dim + shape.qk_pos_emb_head_dim
    latent = shape.q_lora_rank + shape.kv_lora_rank + shape.qk_pos_emb_head_dim
    if precision.qk_layernorm:
        latent += shape.q_lora_rank + shape.kv_lora_rank
    if not precision.fused:
        latent += 4 * shape.qk_pos_emb_head_dim  # sines and cosines
    return [
        Kept("latent vectors and their norms", b * latent, split="sequence"),
        Kept("q, k, v", b * n * (2 * qk + shape.v_head_dim), recomputed_by=("mla_up_proj",)),
        Kept("attention output", b * n * shape.v_head_dim),
        Kept("logsumexp", 4 * n, recomputed_by=("core_attn",)),
    ]


def _sparse_attention(shape: ModelShape, precision: Precision) -> list[Kept]:
    """MLA with its latent vectors shared by the heads, the indexer's q and k, and the picked keys (4 bytes each)."""
    b = precision.activation
    indexer = (shape.dsa_indexer_n_heads + 1) * shape.dsa_indexer_head_dim
    absorbed = 2 * shape.num_attention_heads * (shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
    return [
        *_latent_attention(shape, precision),
        Kept("absorbed q and output", b * absorbed),
        Kept("indexer q, k", b * indexer, split="sequence"),
        Kept("picked keys", 4 * shape.dsa_indexer_topk, split="sequence"),
    ]


def _gated_delta_net(shape: ModelShape, precision: Precision) -> list[Kept]:
    """Projection, convolution in and out, q, k, v repeated to the value heads, 64 products a head, output and gate."""
    b = precision.activation
    keys = shape.linear_num_key_heads * shape.linear_key_head_dim
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    repeated = 2 * shape.linear_num_value_heads * shape.linear_key_head_dim + values
    return [
        Kept("projection", b * (2 * keys + 2 * values + 2 * shape.linear_num_value_heads)),
        Kept("convolution", b * (2 * keys + values)),
        Kept("q, k, v of the delta rule", b * repeated),
        Kept("products within chunks", b * 64 * shape.linear_num_value_heads),
        Kept("output and gated output", 2 * b * values),
    ]


def _mamba(shape: ModelShape, precision: Precision) -> list[Kept]:
    """The fused scan keeps its projection and recomputes the rest; then output and normed output."""
    b, inner = precision.activation, shape.mamba_num_heads * shape.mamba_head_dim
    groups = 2 * shape.mamba_num_groups * shape.mamba_state_dim
    return [
        Kept("projection", b * (2 * inner + groups + shape.mamba_num_heads)),
        Kept("output and normed output", 2 * b * inner),
    ]


def _dense(shape: ModelShape, precision: Precision) -> list[Kept]:
    """The first GEMM's output, 2bf with a gate, and the second's input, bf."""
    kept = _mlp(shape.ffn_hidden_size, shape=shape, precision=precision, what="MLP")
    return [replace(tensor, recomputed_by=("mlp",)) for tensor in kept]


def _moe(shape: ModelShape, precision: Precision) -> list[Kept]:
    """k copies of every token and the experts' GEMMs; routing; shared experts as a dense MLP.

    Routed without dropping: every token visits k experts. A rank's share may be more than the mean
    (`expert_imbalance`).
    """
    b, topk = precision.activation, shape.moe_router_topk
    latent = shape.moe_latent_size or shape.hidden_size
    kept = [
        # A token's scores in fp32 and its place among the routed in int64, for every expert and for the chosen.
        Kept("routing", 12 * shape.num_experts + 24 * topk, split="sequence", recomputed_by=("moe",)),
        Kept("routed tokens", b * topk * latent, split="experts", recomputed_by=("moe",)),
    ]
    width = topk * shape.moe_ffn_hidden_size
    routed = _mlp(width, shape=shape, precision=precision, what="experts")
    if not precision.fused:
        routed.append(Kept("experts, before the router's probability", b * width))
    for index, tensor in enumerate(routed):
        # The first GEMM's output is what the activation is computed from again.
        by = ("moe",) if index == 0 else ("moe", "moe_act")
        kept.append(replace(tensor, split="expert_channels", recomputed_by=by))
    if shape.moe_latent_size:
        kept.append(Kept("latent tokens", 2 * b * latent, split="sequence", recomputed_by=("moe",)))
    if shape.moe_shared_expert_intermediate_size:
        shared = _mlp(
            shape.moe_shared_expert_intermediate_size, shape=shape, precision=precision, what="shared experts"
        )
        kept += [replace(tensor, recomputed_by=("moe", "shared_experts")) for tensor in shared]
    return kept


def _mlp(width: int, *, shape: ModelShape, precision: Precision, what: str) -> list[Kept]:
    b, halves = precision.activation, 2 if shape.gated_linear_unit else 1
    kept = [Kept(f"{what}, first GEMM", b * halves * width), Kept(f"{what}, second GEMM's input", b * width)]
    if shape.gated_linear_unit and not precision.fused:
        kept.append(Kept(f"{what}, both factors", 2 * b * width))
    return kept


_PARTS = {
    "attention": _attention,
    "mla": _latent_attention,
    "dsa": _sparse_attention,
    "gated_delta_net": _gated_delta_net,
    "mamba": _mamba,
    "dense": _dense,
    "moe": _moe,
}
