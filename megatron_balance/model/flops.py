"""Forward FLOPs and weights of a model, one function per kind of layer.

A multiply and an add are two FLOPs, so a token through an `m x n` matrix is `2mn`. Attention is causal:
half of the score matrix is never computed, which cancels that factor of two and leaves `n_heads*dim*L²`
for each of QKᵀ and PV. Norms, rotary embeddings, activations, softmax, sinks and biases are not counted.

Everything is a Python integer, so that ranks agree bit for bit and no length overflows. Symbols in the
docstrings: h hidden_size, n num_attention_heads, g num_query_groups, d kv_channels, V padded_vocab_size,
e 3 with a gated unit, else 2 (GEMMs of an MLP).

Independent checks: Megatron's own `num_floating_point_operations` (megatron/training/training.py, 0.19), here
"Megatron", and torch's FlopCounterMode on Megatron's modules; the tests pin where they agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_balance.errors import BalanceError
from megatron_balance.model.layers import Layer
from megatron_balance.model.vision import image_flops

if TYPE_CHECKING:  # ModelShape counts its weights
    from megatron_balance.model.shape import ModelShape

Gemm = tuple[int, int]
"""Width in and out of a weight matrix."""


@dataclass(frozen=True)
class FlopsPolynomial:
    """FLOPs of one sequence of length L: `(linear + expert_linear)*L + quadratic*L² + Σ c*causal_pairs(L, w)`.

    Attributes:
        linear: FLOPs per token.
        quadratic: FLOPs per squared token.
        expert_linear: FLOPs per token in routed experts, which an expert-parallel group shares.
        windows: pairs `(keys w that a query attends to, FLOPs c)` of sliding-window and of sparse attention,
            ascending.

    Example:
        >>> FlopsPolynomial(linear=10, quadratic=1)(8)
        144
    """

    linear: int = 0
    quadratic: int = 0
    expert_linear: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: FlopsPolynomial) -> FlopsPolynomial:
        windows = dict(self.windows)
        for window, coefficient in other.windows:
            windows[window] = windows.get(window, 0) + coefficient
        return FlopsPolynomial(
            self.linear + other.linear,
            self.quadratic + other.quadratic,
            self.expert_linear + other.expert_linear,
            tuple(sorted(windows.items())),
        )

    def __call__(self, length: int) -> int:
        """FLOPs of one sequence of `length` tokens."""
        in_windows = sum(coefficient * causal_pairs(length, window=w) for w, coefficient in self.windows)
        return (self.linear + self.expert_linear) * length + self.quadratic * length**2 + in_windows


def causal_pairs(length: int, *, window: int) -> int:
    """Twice the query-key pairs that a causal window of `window` tokens computes; L² while it covers all.

    The window's exact count is `wL - w(w-1)/2`; full attention's is `L(L+1)/2`, of which L² leaves out the
    diagonal, as is usual. Sparse attention that picks `window` keys a query computes the same number of pairs.

    Example:
        >>> causal_pairs(100, window=10)
        1910
    """
    return 2 * window * length - window * (window - 1) if window < length else length**2


@dataclass(frozen=True)
class Work:
    """What a layer computes.

    Attributes:
        gemms: weight matrices that every token passes and that adapters are trained for.
        plain_gemms: those without adapters: routers, indexers, projections between models.
        expert_gemms: the matrices of one routed expert.
        state: FLOPs per token that no weight matrix accounts for.
        quadratic: FLOPs per squared token.
        window: keys that a query attends to in place of all; `quadratic` is for these then.
    """

    gemms: Sequence[Gemm] = ()
    plain_gemms: Sequence[Gemm] = ()
    expert_gemms: Sequence[Gemm] = ()
    state: int = 0
    quadratic: int = 0
    window: int = 0

    def flops(self, shape: ModelShape) -> FlopsPolynomial:
        """Forward FLOPs, adapters apart."""
        return FlopsPolynomial(
            linear=2 * _weights(self.gemms) + 2 * _weights(self.plain_gemms) + self.state,
            expert_linear=2 * shape.moe_router_topk * _weights(self.expert_gemms),
            quadratic=0 if self.window else self.quadratic,
            windows=((self.window, self.quadratic),) if self.window else (),
        )

    def adapter_flops(self, shape: ModelShape) -> FlopsPolynomial:
        """Forward FLOPs of LoRA adapters of rank r: `2r(in + out)` a token beside each matrix.

        Source: Hu et al. 2021 (arXiv 2106.09685), section 4.1.
        """

        def of(gemms: Sequence[Gemm]) -> int:
            return 2 * shape.lora_rank * sum(map(sum, gemms))

        return FlopsPolynomial(linear=of(self.gemms), expert_linear=shape.moe_router_topk * of(self.expert_gemms))


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
        >>> from megatron_balance import ModelShape
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
        >>> from megatron_balance import ModelShape
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
        dict: keys `attention`, `mla`, `dsa`, `dsa_indexer`, `dsa_target`, `gated_delta_net`, `mamba`, `dense`, `moe`,
        `mtp_projection`, `lm_head` (the output layer, once per depth more) and `adapters`, as the model has them.
    """
    parts: dict[str, FlopsPolynomial] = {}
    for part, work in _works(shape):
        parts[part] = parts.get(part, FlopsPolynomial()) + work.flops(shape)
        if shape.lora_rank:
            parts["adapters"] = parts.get("adapters", FlopsPolynomial()) + work.adapter_flops(shape)
    return parts


def num_parameters(shape: ModelShape, *, tied: bool = False) -> int:
    """Weights of the language model: all matrices, routed experts each; norms, biases and convolutions left out.

    Args:
        shape: the model.
        tied: the embedding is the output layer (`tie_word_embeddings`).

    Example:
        >>> from megatron_balance import ModelShape
        >>> num_parameters(ModelShape.preset("Qwen3-8B")) // 10**6
        8190
    """
    total = (1 if tied else 2) * shape.hidden_size * shape.padded_vocab_size
    for part, work in _works(shape):
        if part != "lm_head":  # one for all depths of multi-token prediction
            gemms = (*work.gemms, *work.plain_gemms)
            total += _weights(gemms) + shape.num_experts * _weights(work.expert_gemms)
    return total


def _works(shape: ModelShape) -> Iterable[tuple[str, Work]]:
    """All layers and ends of the model, by part."""
    for layer in (*shape.decoder_layers(), *shape.mtp_layers()):
        yield from _mixer(shape, layer).items()
        if layer.mlp is not None:
            yield layer.mlp, moe(shape) if layer.mlp == "moe" else dense(shape)
    for _ in range(shape.mtp_num_layers):
        yield "mtp_projection", mtp_projection(shape)
    for _ in range(1 + shape.mtp_num_layers):
        yield "lm_head", lm_head(shape)


def _mixer(shape: ModelShape, layer: Layer) -> dict[str, Work]:
    if layer.mixer is None:
        return {}
    if layer.mixer == "attention":
        return {"attention": attention(shape, window=layer.window)}
    if layer.mixer == "mla":
        return {"mla": mla(shape, window=layer.window)}
    if layer.mixer in ("dsa", "dsa_shared"):
        works = {"dsa": dsa(shape)}
        if layer.mixer == "dsa":
            works["dsa_indexer"] = dsa_indexer(shape)
            if shape.dsa_indexer_loss:
                works["dsa_target"] = dsa_target(shape)
        return works
    if layer.mixer == "gated_delta_net":
        return {"gated_delta_net": gated_delta_net(shape)}
    return {"mamba": mamba(shape)}


def attention(shape: ModelShape, *, window: int = 0) -> Work:
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
    gemms = ((shape.hidden_size, queries + gate + keys_and_values), (queries, shape.hidden_size))
    return Work(gemms, quadratic=2 * queries, window=window)


def mla(shape: ModelShape, *, window: int = 0) -> Work:
    """Multi-latent attention, uncompressed as it is trained.

    Per token: queries `2*q_lora_rank*(h + n(qk+rope))`, or `2hn(qk+rope)` without q-LoRA; keys and values
    `2(kv_lora_rank*(h + n(qk+v)) + h*rope)`; output `2nvh`. Core `n(qk+rope+v)*L²`.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1. Deviation from Megatron: it adds `2*q_lora_rank` and
    `2*kv_lora_rank` a token for norms; no other kind of layer counts its norms, so neither do we.
    """
    h, n = shape.hidden_size, shape.num_attention_heads
    qk, values = shape.qk_head_dim + shape.qk_pos_emb_head_dim, shape.v_head_dim
    queries = [(h, shape.q_lora_rank), (shape.q_lora_rank, n * qk)] if shape.q_lora_rank else [(h, n * qk)]
    down = (h, shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
    up = (shape.kv_lora_rank, n * (shape.qk_head_dim + values))
    return Work((*queries, down, up, (n * values, h)), quadratic=n * (qk + values), window=window)


def dsa(shape: ModelShape) -> Work:
    """DeepSeek sparse attention: MLA that attends to the k = dsa_indexer_topk keys that an indexer picks.

    It shares one latent vector among all heads, so its core is `n(2*kv_lora_rank + rope)*causal_pairs(L, k)`, wider
    than MLA's `n(qk+rope+v)`; what it projects is MLA's. Short sequences, L <= k, cost what dense attention would.
    Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1; sizes as in megatron.core's AbsorbedMLASelfAttention.
    Deviation from Megatron: it counts full MLA.
    """
    core = shape.num_attention_heads * (2 * shape.kv_lora_rank + shape.qk_pos_emb_head_dim)
    return Work(mla(shape).gemms, quadratic=core, window=shape.dsa_indexer_topk)


def dsa_indexer(shape: ModelShape) -> Work:
    """The lightning indexer of sparse attention: it scores all keys, which is cheap but quadratic.

    With H heads of D: queries `2*q_lora_rank*HD` (`2hHD` without q-LoRA), one key `2hD` and head weights `2hH` a
    token; scores `HD*L²`. Without a loss of its own it runs forward alone (megatron.core's DSAttention: no_grad).
    Source: as for `dsa`; sizes as in DSAIndexer. Deviation from Megatron: it counts no indexer. The weighted sum over
    H heads, 1/D of the scores, is in neither.
    """
    h, heads, width = shape.hidden_size, shape.dsa_indexer_n_heads, shape.dsa_indexer_head_dim
    gemms = ((shape.q_lora_rank or h, heads * width), (h, width), (h, heads))
    return Work(plain_gemms=gemms, quadratic=heads * width)


def dsa_target(shape: ModelShape) -> Work:
    """The target of the indexer's loss: scores of the main attention for all keys, `n(kv_lora_rank + rope)*L²`."""
    return Work(quadratic=shape.num_attention_heads * (shape.kv_lora_rank + shape.qk_pos_emb_head_dim))


def gated_delta_net(shape: ModelShape) -> Work:
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
    convolution = 2 * shape.linear_conv_kernel_dim * (2 * keys + values)
    delta_rule = 8 * shape.linear_key_head_dim * values
    in_proj = (h, 2 * keys + 2 * values + 2 * shape.linear_num_value_heads)
    return Work((in_proj, (values, h)), state=convolution + delta_rule)


def mamba(shape: ModelShape) -> Work:
    """Mamba 2, all linear in L.

    Per token, with i = mamba_num_heads*mamba_head_dim: input projection
    `2h(2i + 2*groups*state + heads)`, scan `7*i*state`, output `2ih`.
    Source: Dao and Gu 2024 (arXiv 2405.21060); the scan's 7 is Megatron's. Deviation from Megatron: it takes
    i = 2h whatever the heads are (megatron.core.ssm.mamba_mixer does not). The convolution, under 0.1 %, is
    in neither.
    """
    inner = shape.mamba_num_heads * shape.mamba_head_dim
    groups = 2 * shape.mamba_num_groups * shape.mamba_state_dim
    in_proj = (shape.hidden_size, 2 * inner + groups + shape.mamba_num_heads)
    return Work((in_proj, (inner, shape.hidden_size)), state=7 * inner * shape.mamba_state_dim)


def dense(shape: ModelShape) -> Work:
    """Dense MLP: `2*e*h*ffn_hidden_size*L`.

    Source: Shazeer 2020 (arXiv 2002.05202) for the gate. Deviation from Megatron: it knows the gate of
    `--swiglu`, not that of `--quick-geglu`.
    """
    return Work(_mlp(shape, shape.hidden_size, shape.ffn_hidden_size))


def moe(shape: ModelShape) -> Work:
    """Mixture of experts: router `2h*num_experts`, shared `2*e*h*shared`, routed `2*e*h*moe_ffn*topk` a token.

    Routed experts on a latent width m cost `2*e*m*moe_ffn*topk`, and `4hm` to reach it and return. Only they
    are shared by the expert-parallel group; router, latent projections and shared experts run where the token is.
    Source: DeepSeekMoE (arXiv 2401.06066). Deviation from Megatron: it leaves the router out. The one-column
    gate of Qwen's shared expert is in neither. Tokens are assumed to be routed evenly, none dropped.
    """
    h, latent = shape.hidden_size, shape.moe_latent_size
    return Work(
        _mlp(shape, h, shape.moe_shared_expert_intermediate_size),
        plain_gemms=((h, shape.num_experts), (h, latent), (latent, h)),
        expert_gemms=_mlp(shape, latent or h, shape.moe_ffn_hidden_size),
    )


def mtp_projection(shape: ModelShape) -> Work:
    """Multi-token prediction, per depth: `4h²` a token joins hidden state and embedding.

    Its layer and its output projection are counted with theirs. Source: DeepSeek-V3 (arXiv 2412.19437),
    section 2.2. Deviation from Megatron: it adds `6h` a token for three norms.
    """
    return Work(plain_gemms=((2 * shape.hidden_size, shape.hidden_size),))


def lm_head(shape: ModelShape) -> Work:
    """Output projection: `2hV*L`, on the last pipeline stage only. The embedding is a look-up and costs none."""
    return Work(plain_gemms=((shape.hidden_size, shape.padded_vocab_size),))


def _mlp(shape: ModelShape, width: int, ffn_hidden_size: int) -> tuple[Gemm, ...]:
    if not ffn_hidden_size:
        return ()
    return (width, (1 + shape.gated_linear_unit) * ffn_hidden_size), (ffn_hidden_size, width)


def _weights(gemms: Sequence[Gemm]) -> int:
    return sum(width_in * width_out for width_in, width_out in gemms)
