"""Forward FLOPs of a model as a polynomial in the sequence length, one function per kind of layer.

A multiply and an add are two FLOPs, so a token through an `m x n` matrix is `2mn`. Attention is causal:
half of the score matrix is never computed, which cancels that factor of two and leaves `n_heads*dim*L²`
for each of QKᵀ and PV. Norms, rotary embeddings, activations, softmax and biases are not counted.

Everything is a Python integer, so that ranks agree bit for bit and no length overflows. Symbols in the
docstrings: h hidden_size, n num_attention_heads, g num_query_groups, d kv_channels, V padded_vocab_size,
e 3 with a gated unit, else 2 (GEMMs of an MLP).

The independent check is Megatron's own `num_floating_point_operations` (megatron/training/training.py,
0.19), here "Megatron"; the tests pin where the two agree and where they do not.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_balance.errors import BalanceError
from megatron_balance.model.flops_polynomial import FlopsPolynomial
from megatron_balance.model.layers import Layer
from megatron_balance.model.shape import ModelShape
from megatron_balance.model.vision import image_flops


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

    Example:
        >>> calculate_fwd_flops([1], ModelShape.preset("Qwen2.5-0.5B")) // 10**6  # twice its 494 M weights
        987
    """
    flops = fwd_flops(shape)
    # numpy integers would wrap; Python's do not.
    total = sum(flops(int(seqlen)) for seqlen in seqlens)
    patches = [int(num_patches) for num_patches in image_patches]
    if not patches:
        return total
    if shape.vision is None:
        raise BalanceError("image_patches are given, but ModelShape.vision is None: give the model an encoder.")
    of_image = image_flops(shape.vision, hidden_size=shape.hidden_size)
    return total + sum(map(of_image, patches))


def linear_coefficient(shape: ModelShape) -> float:
    """The `coeff` of `coeff*L + L²`, the workload that slime and verl balance by.

    It is the linear FLOPs over the quadratic ones, output layer, router and experts included. A window is
    taken for long sequences, where it costs `2w` a token and nothing quadratic. verl's fixed value is 24576.

    Raises:
        BalanceError: no layer has full attention, so nothing grows with L².

    Example:
        >>> round(linear_coefficient(ModelShape.preset("Qwen3-8B")))
        51324
    """
    flops = fwd_flops(shape)
    if flops.quadratic == 0:
        raise BalanceError(
            "ModelShape has no layer with full attention: coeff*L + L² cannot describe it, use calculate_fwd_flops."
        )
    linear = flops.linear + flops.expert_linear + sum(2 * window * c for window, c in flops.windows)
    return linear / flops.quadratic


def fwd_flops(shape: ModelShape) -> FlopsPolynomial:
    """Forward FLOPs of the whole language model; a vision encoder's are in vision.py."""
    return sum(fwd_flops_by_part(shape).values(), FlopsPolynomial())


def fwd_flops_by_part(shape: ModelShape) -> dict[str, FlopsPolynomial]:
    """Forward FLOPs by kind of layer, summed over layers.

    Returns:
        dict: keys `attention`, `mla`, `dsa`, `gated_delta_net`, `mamba`, `dense`, `moe` as the model has them,
        `mtp_projection` with multi-token prediction, and `lm_head`: the output layer, once per depth more.
    """
    parts: dict[str, FlopsPolynomial] = {}

    def add(part: str, flops: FlopsPolynomial) -> None:
        parts[part] = parts.get(part, FlopsPolynomial()) + flops

    for layer in (*shape.decoder_layers(), *shape.mtp_layers()):
        if layer.mixer is not None:
            add(layer.mixer, mixer_flops(shape, layer=layer))
        if layer.mlp is not None:
            add(layer.mlp, moe_flops(shape) if layer.mlp == "moe" else dense_flops(shape))
    for _ in range(shape.mtp_num_layers):
        add("mtp_projection", mtp_projection_flops(shape))
    for _ in range(1 + shape.mtp_num_layers):
        add("lm_head", lm_head_flops(shape))
    return parts


def mixer_flops(shape: ModelShape, *, layer: Layer) -> FlopsPolynomial:
    """FLOPs of a layer's token mixer; zero in a hybrid model's MLP layer."""
    if layer.mixer == "attention":
        return attention_flops(shape, window=layer.window)
    if layer.mixer == "mla":
        return mla_flops(shape, window=layer.window)
    if layer.mixer == "dsa":
        return dsa_flops(shape)
    if layer.mixer == "gated_delta_net":
        return gated_delta_net_flops(shape)
    if layer.mixer == "mamba":
        return mamba_flops(shape)
    return FlopsPolynomial()


def attention_flops(shape: ModelShape, *, window: int = 0) -> FlopsPolynomial:
    """Grouped-query attention: `L*(2h(nd(1+gate) + 2gd) + 2ndh)` for Q, K, V, gate and output, core `2nd*L²`.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), appendix, with g key heads and a causal mask.
    Deviation from Megatron: a window's core is `2nd*causal_pairs(L, w)`, which it counts as full; in a hybrid
    model it leaves out the output gate.

    Args:
        shape: the model.
        window: tokens a query attends to, itself included; 0 for all.
    """
    queries = shape.num_attention_heads * shape.kv_channels
    keys_and_values = 2 * shape.num_query_groups * shape.kv_channels
    gate = queries if shape.attention_output_gate else 0
    linear = 2 * shape.hidden_size * (queries + gate + keys_and_values) + 2 * queries * shape.hidden_size
    return _core(linear, 2 * queries, window)


def mla_flops(shape: ModelShape, *, window: int = 0) -> FlopsPolynomial:
    """Multi-latent attention, uncompressed as it is trained.

    Per token: queries `2*q_lora_rank*(h + n(qk+rope))`, or `2hn(qk+rope)` without q-LoRA; keys and values
    `2(kv_lora_rank*(h + n(qk+v)) + h*rope)`; output `2nvh`. Core `n(qk+rope+v)*L²`.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. Deviation from Megatron: it adds `2*q_lora_rank` and
    `2*kv_lora_rank` a token for norms; no other kind of layer counts its norms, so neither do we.
    """
    h, n = shape.hidden_size, shape.num_attention_heads
    qk = shape.qk_head_dim + shape.qk_pos_emb_head_dim
    queries = shape.q_lora_rank * (h + n * qk) if shape.q_lora_rank else h * n * qk
    keys_and_values = shape.kv_lora_rank * (h + n * (shape.qk_head_dim + shape.v_head_dim))
    rotary_key = h * shape.qk_pos_emb_head_dim
    output = n * shape.v_head_dim * h
    linear = 2 * (queries + keys_and_values + rotary_key + output)
    return _core(linear, n * (qk + shape.v_head_dim), window)


def dsa_flops(shape: ModelShape) -> FlopsPolynomial:
    """DeepSeek sparse attention: an indexer scores all keys, MLA attends to the k = dsa_indexer_topk best.

    Indexer, with H heads of D: queries `2*q_lora_rank*HD` (`2hHD` without q-LoRA), one key `2hD` and head weights
    `2hH` a token; scores `HD*L²`, cheap but quadratic. Attention shares one latent vector among all heads, so its
    core is `n(2*kv_lora_rank + rope)*causal_pairs(L, k)`, wider than MLA's `n(qk+rope+v)`; what it projects is
    MLA's. Short sequences, L <= k, cost what dense attention would and the indexer on top.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; sizes as in megatron.core's DSAIndexer and
    AbsorbedMLASelfAttention. Deviation from Megatron: it counts full MLA and no indexer. Its unfused kernels
    compute all scores, masked half included. The weighted sum over H heads, 1/D of the scores, and the indexer's
    own loss are in neither.
    """
    h, heads = shape.hidden_size, shape.dsa_indexer_n_heads
    queries = (shape.q_lora_rank or h) * heads * shape.dsa_indexer_head_dim
    indexer = FlopsPolynomial(
        linear=2 * (queries + h * shape.dsa_indexer_head_dim + h * heads),
        quadratic=heads * shape.dsa_indexer_head_dim,
    )
    core = shape.num_attention_heads * (2 * shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
    return indexer + _core(mla_flops(shape).linear, core, shape.dsa_indexer_topk)


def gated_delta_net_flops(shape: ModelShape) -> FlopsPolynomial:
    """Gated delta net, all linear in L.

    Per token, with q = num_key_heads*dk, v = num_value_heads*dv: input projection
    `2h(2q + 2v + 2*num_value_heads)`, convolution `2*kernel*(2q + v)`, the state's four products
    `8*num_value_heads*dk*dv`, output `2hv`.
    Source: Yang et al. 2024 (arXiv 2412.06464); sizes as in megatron.core.ssm.gated_delta_net. Deviation from
    Megatron: its state is `dv²`, the same only where dk equals dv. The chunked kernel's extra products are
    in neither.
    """
    h = shape.hidden_size
    keys = shape.linear_num_key_heads * shape.linear_key_head_dim
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    in_proj = 2 * h * (2 * keys + 2 * values + 2 * shape.linear_num_value_heads)
    convolution = 2 * shape.linear_conv_kernel_dim * (2 * keys + values)
    delta_rule = 8 * shape.linear_key_head_dim * values
    return FlopsPolynomial(linear=in_proj + convolution + delta_rule + 2 * h * values)


def mamba_flops(shape: ModelShape) -> FlopsPolynomial:
    """Mamba 2, all linear in L.

    Per token, with i = mamba_num_heads*mamba_head_dim: input projection
    `2h(2i + 2*groups*state + heads)`, scan `7*i*state`, output `2ih`.
    Source: Dao and Gu 2024 (arXiv 2405.21060); the scan's 7 is Megatron's. Deviation from Megatron: it takes
    i = 2h whatever the heads are (megatron.core.ssm.mamba_mixer does not). The convolution, under 0.1 %, is
    in neither.
    """
    inner = shape.mamba_num_heads * shape.mamba_head_dim
    groups = 2 * shape.mamba_num_groups * shape.mamba_state_dim
    in_proj = 2 * shape.hidden_size * (2 * inner + groups + shape.mamba_num_heads)
    scan = 7 * inner * shape.mamba_state_dim
    return FlopsPolynomial(linear=in_proj + scan + 2 * inner * shape.hidden_size)


def dense_flops(shape: ModelShape) -> FlopsPolynomial:
    """Dense MLP: `2*e*h*ffn_hidden_size*L`.

    Source: Shazeer 2020 (arXiv 2002.05202) for the gate. Deviation from Megatron: it knows the gate of
    `--swiglu`, not that of `--quick-geglu`.
    """
    return FlopsPolynomial(linear=_mlp(shape, shape.hidden_size, shape.ffn_hidden_size))


def moe_flops(shape: ModelShape) -> FlopsPolynomial:
    """Mixture of experts: router `2h*num_experts`, shared `2*e*h*shared`, routed `2*e*h*moe_ffn*topk` a token.

    Routed experts on a latent width m cost `2*e*m*moe_ffn*topk`, and `4hm` to reach it and return. Only they
    are shared by the expert-parallel group; router, latent projections and shared experts run where the token is.
    Source: DeepSeekMoE (arXiv 2401.06066). Deviation from Megatron: it leaves the router out. The one-column
    gate of Qwen's shared expert is in neither. Tokens are assumed to be routed evenly, none dropped.
    """
    h, latent = shape.hidden_size, shape.moe_latent_size
    router = 2 * h * shape.num_experts
    shared = _mlp(shape, h, shape.moe_shared_expert_intermediate_size)
    routed = _mlp(shape, latent or h, shape.moe_ffn_hidden_size) * shape.moe_router_topk
    return FlopsPolynomial(linear=router + shared + 4 * h * latent, expert_linear=routed)


def mtp_projection_flops(shape: ModelShape) -> FlopsPolynomial:
    """Multi-token prediction, per depth: `4h²` a token joins hidden state and embedding.

    Its layer and its output projection are counted with theirs. Source: DeepSeek-V3 (arXiv 2412.19437),
    section 2.2. Deviation from Megatron: it adds `6h` a token for three norms.
    """
    return FlopsPolynomial(linear=4 * shape.hidden_size**2)


def lm_head_flops(shape: ModelShape) -> FlopsPolynomial:
    """Output projection: `2hV*L`, on the last pipeline stage only. The embedding is a look-up and costs none."""
    return FlopsPolynomial(linear=2 * shape.hidden_size * shape.padded_vocab_size)


def _mlp(shape: ModelShape, width: int, ffn_hidden_size: int) -> int:
    gemms = 3 if shape.gated_linear_unit else 2
    return 2 * gemms * width * ffn_hidden_size


def _core(linear: int, core: int, window: int) -> FlopsPolynomial:
    if window:
        return FlopsPolynomial(linear=linear, windows=((window, core),))
    return FlopsPolynomial(linear=linear, quadratic=core)
