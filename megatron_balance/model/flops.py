"""Forward FLOPs of a model, one function per kind of layer, and what context-parallel ranks exchange.

A multiply and an add are two FLOPs, so a token through an `m x n` matrix is `2mn`. Attention is causal:
half of the score matrix is never computed, which leaves `n_heads*dim*L²` for each of QKᵀ and PV. Norms, rotary
embeddings, activations, softmax, sinks and biases are not counted. docs/cost-model.md has the formulas and sources.
Everything is a Python integer, so that ranks agree bit for bit and no length overflows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_balance.errors import BalanceError

if TYPE_CHECKING:  # ModelShape checks what its layers need
    from megatron_balance.model.shape import ModelShape


@dataclass(frozen=True)
class Layer:
    """One layer: its mixer and MLP, each None in a hybrid model's layer that is the polynomial.

    `window` is the tokens that a query attends to, itself included; 0 where it attends to all before it, or to the keys
    that sparse attention picks.
    """

    mixer: str | None
    mlp: str | None
    window: int = 0


@dataclass(frozen=True)
class Chunk:
    """What a model chunk of a pipeline stage runs: decoder and MTP layers, projections of MTP depths, output layers."""

    layers: tuple[Layer, ...]
    mtp_projections: int = 0
    output_layers: int = 0
    has_encoder: bool = False


def whole_model(shape: ModelShape) -> Chunk:
    """All layers of a model, its ends and the encoder of its images. The output layer runs once more per depth."""
    depths = shape.mtp_num_layers
    return Chunk(shape.layers(), depths, 1 + depths, has_encoder=True)


def hybrid_parts(pattern: str) -> list[str]:
    """Symbols of the layers of a hybrid model's decoder, then those of each multi-token-prediction depth."""
    main, *depths = pattern.replace("|", "").split("/")
    return [main, *filter(None, depths)]


_LATENT = ("kv_lora_rank", "qk_head_dim", "v_head_dim")

NEEDED: dict[str, tuple[str, ...]] = {
    "mla": _LATENT,
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
"""Sizes that each kind of layer requires, under their names in a ModelShape."""

_OPTIONAL = ("moe_shared_expert_intermediate_size", "moe_latent_size", "q_lora_rank", "qk_pos_emb_head_dim")
SIZES = sorted({*_OPTIONAL}.union(*NEEDED.values()))
"""These, and those that a layer may have."""


@dataclass(frozen=True)
class FlopsPolynomial:
    """FLOPs of one sequence of length L: `(linear + expert_linear)*L + quadratic*L² + Σ c*causal_pairs(L, w)`.

    `expert_linear` is of routed experts, which an expert-parallel group shares; `windows` are pairs `(keys w that a
    query attends to, FLOPs c)` of sliding-window and of sparse attention, ascending.

    Examples:
        >>> FlopsPolynomial(linear=10, quadratic=1)(8)
        144
    """

    linear: int = 0
    quadratic: int = 0
    expert_linear: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def __add__(self, polynomial: FlopsPolynomial) -> FlopsPolynomial:
        windows = Counter(dict(self.windows)) + Counter(dict(polynomial.windows))
        return FlopsPolynomial(
            self.linear + polynomial.linear,
            self.quadratic + polynomial.quadratic,
            self.expert_linear + polynomial.expert_linear,
            tuple(sorted(windows.items())),
        )

    def __call__(self, length: int) -> int:
        """FLOPs of one sequence of `length` tokens."""
        in_windows = sum(coefficient * causal_pairs(length, window=w) for w, coefficient in self.windows)
        return (self.linear + self.expert_linear) * length + self.quadratic * length**2 + in_windows


def causal_pairs(length: Any, *, window: int) -> Any:
    """Twice the query-key pairs that a causal window of `window` tokens computes; L² while it covers all.

    The window's exact count is `wL - w(w-1)/2`; full attention's is `L(L+1)/2`, of which L² leaves out the
    diagonal, as is usual. Sparse attention that picks `window` keys a query computes the same number of pairs.
    `length`: an integer, or an array of them.

    Examples:
        >>> causal_pairs(100, window=10)
        1910
    """
    is_cut = length > window
    return is_cut * (2 * window * length - window * (window - 1)) + (1 - is_cut) * length * length


def calculate_fwd_flops(seqlens: Iterable[int], shape: ModelShape, *, image_patches: Iterable[int] = ()) -> int:
    """Forward FLOPs of sequences of these lengths, each attending to itself only, and of their images.

    Args:
        seqlens: `[num_sequences]` tokens, those of images included.
        shape: the model.
        image_patches: `[num_images]` patches of each image; the model must have an encoder then.

    Returns:
        int: FLOPs, exact.

    Raises:
        BalanceError: images of a model without an encoder.

    Examples:
        >>> from megatron_balance import ModelShape
        >>> calculate_fwd_flops([1], ModelShape.preset("Qwen2.5-0.5B")) // 10**6  # twice its 494 M weights
        987
    """
    patches = list(map(int, image_patches))  # numpy's integers would wrap
    if patches and shape.vision is None:
        raise BalanceError("image_patches are given, but ModelShape.vision is None: give the model an encoder.")
    return sum(map(fwd_flops(shape), map(int, seqlens))) + sum(map(image_flops(shape), patches))


def image_flops(shape: ModelShape) -> FlopsPolynomial:
    """Forward FLOPs of an image of P patches through the model's encoder and projector; none without an encoder.

    Attention is not causal, so each of QKᵀ and PV is `2h*P²`, twice a language model's. docs/cost-model.md has the
    formulas, after Dosovitskiy et al. 2020 (arXiv 2010.11929), section 3.1, and for windows and merging Qwen2.5-VL
    (arXiv 2502.13923), section 2.1. Every window counts as full: an upper bound where an image's edges cut some.
    """
    if (encoder := shape.vision) is None:
        return FlopsPolynomial()
    h, layers, joined = encoder.hidden_size, encoder.num_layers, encoder.patches_per_token
    layer = 8 * h**2 + 2 * (2 + encoder.gated_linear_unit) * h * encoder.ffn_hidden_size
    projectors = 2 * encoder.num_projectors * h * (joined * h + shape.hidden_size)
    in_windows = 4 * h * encoder.window_patches * encoder.num_windowed_layers
    return FlopsPolynomial(
        linear=2 * encoder.patch_values * h + layers * layer + projectors + in_windows,
        quadratic=4 * h * (layers - encoder.num_windowed_layers),
    )


def fwd_flops(shape: ModelShape) -> FlopsPolynomial:
    """Forward FLOPs of the whole language model, without its images."""
    return sum(fwd_flops_by_part(shape).values(), FlopsPolynomial())


def fwd_flops_by_part(shape: ModelShape, chunk: Chunk | None = None) -> dict[str, FlopsPolynomial]:
    """Forward FLOPs by kind of layer, summed over layers; of a chunk, or of the whole model."""
    parts: dict[str, FlopsPolynomial] = {}
    chunk = chunk or whole_model(shape)
    for layer in chunk.layers:
        for part, flops_of in (_PARTS[layer.mixer] | _PARTS[layer.mlp]).items():
            flops = flops_of(shape)
            if layer.window and part == layer.mixer:
                flops = replace(flops, quadratic=0, windows=((layer.window, flops.quadratic),))
            parts[part] = parts.get(part, FlopsPolynomial()) + flops
    if chunk.mtp_projections:  # a depth joins hidden state and embedding
        parts["mtp_projection"] = FlopsPolynomial(4 * chunk.mtp_projections * shape.hidden_size**2)
    if chunk.output_layers:
        parts["lm_head"] = FlopsPolynomial(2 * chunk.output_layers * shape.hidden_size * shape.padded_vocab_size)
    return parts


def _attention(shape: ModelShape) -> FlopsPolynomial:
    queries = shape.num_attention_heads * shape.kv_channels
    keys_and_values = 2 * shape.num_query_groups * shape.kv_channels
    weights = shape.hidden_size * ((2 + shape.attention_output_gate) * queries + keys_and_values)
    return FlopsPolynomial(2 * weights, quadratic=2 * queries)


def _mla(shape: ModelShape) -> FlopsPolynomial:
    """Multi-latent attention, uncompressed as it is trained."""
    h, n, compressed = shape.hidden_size, shape.num_attention_heads, shape.q_lora_rank
    qk, values = shape.qk_head_dim + shape.qk_pos_emb_head_dim, shape.v_head_dim
    queries = compressed * (h + n * qk) if compressed else h * n * qk
    down = h * (shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
    up = shape.kv_lora_rank * n * (shape.qk_head_dim + values)
    return FlopsPolynomial(2 * (queries + down + up + n * values * h), quadratic=n * (qk + values))


def _dsa(shape: ModelShape) -> FlopsPolynomial:
    """Sparse attention: all heads share one latent vector (megatron.core's AbsorbedMLASelfAttention)."""
    core = shape.num_attention_heads * (2 * shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
    return FlopsPolynomial(_mla(shape).linear, windows=((shape.dsa_indexer_topk, core),))


def _dsa_indexer(shape: ModelShape) -> FlopsPolynomial:
    """Scores of all keys (megatron.core's DSAIndexer); the weighted sum over heads, 1/D of them, is not counted."""
    h, heads, width = shape.hidden_size, shape.dsa_indexer_n_heads, shape.dsa_indexer_head_dim
    weights = (shape.q_lora_rank or h) * heads * width + h * (width + heads)
    return FlopsPolynomial(2 * weights, quadratic=heads * width)


def _gated_delta_net(shape: ModelShape) -> FlopsPolynomial:
    """Sizes as in megatron.core.ssm.gated_delta_net; the chunked kernel's extra products are not counted."""
    keys = shape.linear_num_key_heads * shape.linear_key_head_dim
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    convolution = 2 * shape.linear_conv_kernel_dim * (2 * keys + values)
    delta_rule = 8 * shape.linear_key_head_dim * values
    projections = 2 * keys + 3 * values + 2 * shape.linear_num_value_heads
    return FlopsPolynomial(2 * shape.hidden_size * projections + convolution + delta_rule)


def _mamba(shape: ModelShape) -> FlopsPolynomial:
    """Sizes as in megatron.core.ssm.mamba_mixer, the scan's 7 as Megatron has it; no convolution, under 0.1 %."""
    inner = shape.mamba_num_heads * shape.mamba_head_dim
    groups = 2 * shape.mamba_num_groups * shape.mamba_state_dim
    projections = 3 * inner + groups + shape.mamba_num_heads
    return FlopsPolynomial(2 * shape.hidden_size * projections + 7 * inner * shape.mamba_state_dim)


def _dense(shape: ModelShape) -> FlopsPolynomial:
    return FlopsPolynomial(_mlp(shape, shape.hidden_size, shape.ffn_hidden_size))


def _moe(shape: ModelShape) -> FlopsPolynomial:
    """Router, shared and routed experts, these on a latent width perhaps; routed evenly, no token dropped."""
    h, latent = shape.hidden_size, shape.moe_latent_size
    shared = _mlp(shape, h, shape.moe_shared_expert_intermediate_size)
    experts = shape.moe_router_topk * _mlp(shape, latent or h, shape.moe_ffn_hidden_size)
    return FlopsPolynomial(2 * h * (shape.num_experts + 2 * latent) + shared, expert_linear=experts)


def _mlp(shape: ModelShape, width: int, ffn_hidden_size: int) -> int:
    """FLOPs of a token."""
    return 2 * (2 + shape.gated_linear_unit) * width * ffn_hidden_size


_PARTS: Mapping[str | None, dict[str, Callable[[ModelShape], FlopsPolynomial]]] = {
    None: {},
    "attention": {"attention": _attention},
    "mla": {"mla": _mla},
    "dsa": {"dsa": _dsa, "dsa_indexer": _dsa_indexer},
    "gated_delta_net": {"gated_delta_net": _gated_delta_net},
    "mamba": {"mamba": _mamba},
    "dense": {"dense": _dense},
    "moe": {"moe": _moe},
}
"""Parts of each kind of mixer and MLP."""


def exchange_numbers(shape: ModelShape, layers: Iterable[Layer], *, tp_size: int = 1) -> dict[str, int]:
    """Numbers that context-parallel ranks exchange for a token, in a training step and on all tensor-parallel ranks.

    By the names of a CostModel's coefficients:

    - `cp_exchange`: keys and values that a ring passes on forward, once more in the backward pass, and there their
      gradients as well (Liu et al. 2023, arXiv 2310.01889, section 3); windows do not shorten it;
    - `cp_all_to_all`: what mixers work on by heads in place of tokens, once each way (megatron.core 0.19,
      ssm/gated_delta_net/gdn.py: queries, keys, values, gates and two numbers a head, and values back;
      ssm/mamba_context_parallel.py: `pre_conv_ssm` and `post_conv_ssm`, groups repeated for more ranks counted once);
    - `cp_all_gather`: the latent key of sparse attention, once each way, and its indexer's, forward
      (transformer/experimental_attention_variant/dsa.py). All heads share them: each tensor-parallel rank gathers all.
    """
    ring = all_to_all = all_gather = 0
    for layer in layers:
        if layer.mixer == "attention":
            ring += 3 * 2 * shape.num_query_groups * shape.kv_channels
        elif layer.mixer == "mla":  # uncompressed, as it is trained
            width = shape.qk_head_dim + shape.qk_pos_emb_head_dim + shape.v_head_dim
            ring += 3 * shape.num_attention_heads * width
        elif layer.mixer == "gated_delta_net":
            keys = shape.linear_num_key_heads * shape.linear_key_head_dim
            values = shape.linear_num_value_heads * shape.linear_value_head_dim
            all_to_all += 2 * (2 * keys + 3 * values + 2 * shape.linear_num_value_heads)
        elif layer.mixer == "mamba":
            inner = shape.mamba_num_heads * shape.mamba_head_dim
            groups = shape.mamba_num_groups * shape.mamba_state_dim
            all_to_all += 2 * (3 * inner + 2 * groups + shape.mamba_num_heads)
        elif layer.mixer == "dsa":
            latent = shape.kv_lora_rank + shape.qk_pos_emb_head_dim
            all_gather += tp_size * (2 * latent + shape.dsa_indexer_head_dim)
    return {"cp_exchange": ring, "cp_all_to_all": all_to_all, "cp_all_gather": all_gather}
