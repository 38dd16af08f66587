"""The shape of a language model: the sizes that its FLOPs depend on.

Fields carry Megatron's argument names; where Megatron says None for "the model has none of this", a number here is 0.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError, check_sizes
from megatron_balance.model.flops import NEEDED, Layer, calculate_fwd_flops, hybrid_parts
from megatron_balance.model.hf_config import PRESETS, ROWS, fields_from_hf_config
from megatron_balance.model.megatron_args import fields_from_megatron_args, fields_from_transformer_config
from megatron_balance.model.vision import VisionEncoder

HYBRID_LAYERS = {
    "*": Layer("attention", None),
    "+": Layer("mla", None),
    "D": Layer("dsa", None),
    "G": Layer("gated_delta_net", None),
    "M": Layer("mamba", None),
    "-": Layer(None, "dense"),
    "E": Layer(None, "moe"),
}
"""Megatron's symbols (megatron.core.models.hybrid.hybrid_layer_allocation)."""

_SYMBOLS = f"{''.join(HYBRID_LAYERS)}, whose FLOPs are known; balance other layers by tokens"
_PATTERNS = ("moe_layer_freq", "window_attn_skip_freq", "linear_attention_freq")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only language model, under Megatron's argument names.

    Attributes:
        hidden_size: width of the residual stream.
        num_layers: decoder layers, multi-token-prediction depths not counted.
        num_attention_heads: query heads.
        num_query_groups: key and value heads; as many as query heads without grouped-query attention.
        kv_channels: width of one head.
        ffn_hidden_size: width of a dense MLP; 0 if no layer has one.
        padded_vocab_size: rows of the output projection.
        gated_linear_unit: MLPs and experts have a gate (SwiGLU, GeGLU): three GEMMs, not two.
        attention_output_gate: attention has an output gate as wide as its queries.
        num_experts, moe_router_topk, moe_ffn_hidden_size: routed experts, those a token visits, their width.
        moe_shared_expert_intermediate_size: width of the shared experts together.
        moe_latent_size: width that routed experts work on, where it is not hidden_size.
        moe_layer_freq: `[num_layers]`, 1 for a MoE layer; () when all are, or none (num_experts 0).
        multi_latent_attention: attention is MLA.
        q_lora_rank, kv_lora_rank, qk_head_dim, qk_pos_emb_head_dim, v_head_dim: its widths.
        dsa_indexer_topk: keys a query attends to under DeepSeek sparse attention; 0 for none. Every layer with
            multi-latent attention is sparse then, except the `+` of a hybrid pattern.
        dsa_indexer_n_heads, dsa_indexer_head_dim: sizes of the indexer that picks them.
        window_size: sliding window `(left, right)` as Megatron has it: a query sees `left` tokens before itself.
        window_attn_skip_freq: `[num_layers]`, 1 for a windowed layer; () when all are, or none (no window_size).
        linear_attention_freq: `[num_layers]`, 1 for a gated delta net layer; () when none is.
        linear_key_head_dim, linear_value_head_dim, linear_num_key_heads, linear_num_value_heads,
            linear_conv_kernel_dim: sizes of a gated delta net.
        hybrid_layer_pattern: one symbol a layer (`M` Mamba, `*` attention, `+` MLA, `D` sparse attention, `G` gated
            delta net, `-` MLP, `E` MoE), `/` before each multi-token-prediction depth; `|` is ignored. Patterns
            above do not apply then.
        mamba_state_dim, mamba_head_dim, mamba_num_groups, mamba_num_heads: sizes of a Mamba 2 layer.
        mtp_num_layers: multi-token-prediction depths.
        lora_rank: rank of adapters beside all matrices, whose own weights are frozen then; 0 for none. Adapters' own
            work is not counted.
        vision: encoder of images and projector; None for a model of text alone.

    Raises:
        BalanceError: a size is not a non-negative integer, one that a layer needs is 0, a pattern has the
            wrong length or entries, or heads do not divide.

    Examples:
        >>> ModelShape.preset("qwen2.5-0.5b").hidden_size
        896
    """

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int = 0
    padded_vocab_size: int
    gated_linear_unit: bool
    attention_output_gate: bool = False
    num_experts: int = 0
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int = 0
    moe_layer_freq: tuple[int, ...] = ()
    multi_latent_attention: bool = False
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_head_dim: int = 0
    qk_pos_emb_head_dim: int = 0
    v_head_dim: int = 0
    dsa_indexer_n_heads: int = 0
    dsa_indexer_head_dim: int = 0
    dsa_indexer_topk: int = 0
    window_size: tuple[int, int] | None = None
    window_attn_skip_freq: tuple[int, ...] = ()
    linear_attention_freq: tuple[int, ...] = ()
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_conv_kernel_dim: int = 0
    hybrid_layer_pattern: str = ""
    mamba_state_dim: int = 0
    mamba_head_dim: int = 0
    mamba_num_groups: int = 0
    mamba_num_heads: int = 0
    mtp_num_layers: int = 0
    lora_rank: int = 0
    vision: VisionEncoder | None = None

    def __post_init__(self) -> None:
        check_sizes(self)
        main, *depths = hybrid_parts(self.hybrid_layer_pattern)
        window = (0, 0) if self.window_size is None else self.window_size
        layers, latent = (self.num_layers, self.mtp_num_layers), self.multi_latent_attention or bool(main)
        heads, experts = self.num_attention_heads, self.num_experts
        for name, is_right, needs in (
            ("num_query_groups", heads % self.num_query_groups == 0, f"divide num_attention_heads, {heads}"),
            ("moe_router_topk", self.moe_router_topk <= experts, f"be at most num_experts, {experts}"),
            ("window_size", len(window) == 2 and min(window) >= -1, "be (left, right) tokens, -1 for no bound"),
            ("dsa_indexer_topk", latent or not self.dsa_indexer_topk, "be 0 without multi_latent_attention"),
            ("hybrid_layer_pattern", {*main}.union(*depths) <= {*HYBRID_LAYERS}, f"consist of {_SYMBOLS}"),
            ("hybrid_layer_pattern", not main or (len(main), len(depths)) == layers, f"have {layers} layers, depths"),
            *(
                (name, len(getattr(self, name)) in (0, layers[0]), f"have an entry for each of {layers[0]} layers")
                for name in _PATTERNS
            ),
        ):
            if not is_right:
                raise BalanceError(f"ModelShape.{name} is {getattr(self, name)!r}: it must {needs}.")
        for layer in {*self.layers()}:
            for kind in filter(None, (layer.mixer, layer.mlp)):
                for name in NEEDED.get(kind, ()):
                    if not getattr(self, name):
                        raise BalanceError(f"ModelShape.{name} is 0: a {kind} layer needs it, give a positive integer.")

    @classmethod
    def from_megatron_args(cls, args: object) -> ModelShape:
        """Shape of the model that Megatron's parsed arguments describe.

        Args:
            args: the Namespace of `megatron.training.arguments.parse_args`, best after `validate_args`;
                None is filled in as `validate_args` would.

        Raises:
            BalanceError: an argument is missing, or asks for layers whose FLOPs are not known here.
        """
        return cls(**fields_from_megatron_args(args))

    @classmethod
    def from_transformer_config(
        cls, config: object, *, padded_vocab_size: int, hybrid_layer_pattern: str = ""
    ) -> ModelShape:
        """Shape of the model that a configuration of megatron.core describes.

        Args:
            config: a TransformerConfig or MLATransformerConfig.
            padded_vocab_size: rows of the output projection, which the configuration does not hold.
            hybrid_layer_pattern: one symbol a layer; needed where `config.is_hybrid_model` is set.

        Raises:
            BalanceError: config is something else, or asks for layers whose FLOPs are not known here.
        """
        sizes: dict[str, Any] = {"padded_vocab_size": padded_vocab_size, "hybrid_layer_pattern": hybrid_layer_pattern}
        return cls(**fields_from_transformer_config(config, **sizes))

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any] | str | Path) -> ModelShape:
        """Shape of the model that a Hugging Face `config.json` describes: its text model, and a known vision encoder.

        Args:
            config: the file, the folder that holds it, or its content. The vocabulary is taken unchanged;
                Megatron pads it (`--make-vocab-size-divisible-by`). Multi-token prediction is left off, since
                the run decides on it: `dataclasses.replace(shape, mtp_num_layers=1)`.

        A model_type that is not known is read by its keys; a warning says which, and how many weights follow.

        Raises:
            BalanceError: the file is missing, or describes layers that are not counted here or sizes that cannot be.
        """
        sizes, warning = fields_from_hf_config(config)
        shape = cls(**sizes)
        if warning:
            weights = calculate_fwd_flops([1], shape) / 2e9
            warnings.warn(f"{warning} A token passes {weights:.2f} billion of its weights.", stacklevel=2)
        return shape

    @staticmethod
    def presets() -> list[str]:
        """Names that `preset` takes."""
        return [*PRESETS]

    @classmethod
    def preset(cls, name: str) -> ModelShape:
        """Shape of a well-known model, by its name on Hugging Face with or without the owner, in any case.

        Raises:
            BalanceError: there is no such preset.
        """
        names = {alias.lower(): preset for preset, row in ROWS.items() for alias in (preset, row["source"])}
        preset = names.get(name.lower())
        if preset is None:
            raise BalanceError(
                f"the model (--model) is {name!r}, which is no preset (compare --help has all): give the path of its "
                "config.json, from its page on Hugging Face (ModelShape.from_hf_config)."
            )
        return cls.from_hf_config(PRESETS[preset])

    def layers(self) -> tuple[Layer, ...]:
        """The decoder's layers, first to last, then those of all multi-token-prediction depths.

        Each depth repeats the decoder's last layer (get_gpt_mtp_block_spec), with its own count of layers from 1,
        which decides its window; a hybrid model's pattern has the layers of a depth.
        """
        parts = [[HYBRID_LAYERS[symbol] for symbol in part] for part in hybrid_parts(self.hybrid_layer_pattern)]
        if not self.hybrid_layer_pattern:
            attention = "attention"
            if self.multi_latent_attention:
                attention = "dsa" if self.dsa_indexer_topk else "mla"
            decoder: list[Layer] = []
            for is_linear, is_moe in zip(
                self.linear_attention_freq or (0,) * self.num_layers,
                self.moe_layer_freq or (1,) * self.num_layers,
                strict=True,
            ):
                mixer = "gated_delta_net" if is_linear else attention
                decoder.append(Layer(mixer, "moe" if is_moe and self.num_experts else "dense"))
            parts = [decoder, *[decoder[-1:]] * self.mtp_num_layers]
        # A window is of attention to what is before, and FlashAttention's (left, 0) is left + 1 tokens.
        window = 0 if self.window_size is None else self.window_size[0] + 1
        windowed = self.window_attn_skip_freq or (1,)
        return tuple(
            replace(layer, window=window * windowed[index % len(windowed)])
            if layer.mixer in ("attention", "mla")
            else layer
            for part in parts
            for index, layer in enumerate(part)
        )

    def largest_cp_size(self, tp_size: int = 1, *, attention_by_heads: bool = False) -> int | None:
        """The most context-parallel ranks, a power of two, that can share a sequence; None where layers set no bound.

        Each gets as many of a tensor-parallel rank's heads in gated delta nets, Mamba (whose groups may be repeated)
        and, where it exchanges heads (`--cp-comm-type a2a`), attention.

        Examples:
            >>> ModelShape.preset("Qwen3.5-35B-A3B").largest_cp_size(tp_size=2)
            8
        """
        mixers = {layer.mixer for layer in self.layers()}
        split = {
            "gated_delta_net": [self.linear_num_key_heads, self.linear_num_value_heads],
            "mamba": [self.mamba_num_heads],
            "attention": [self.num_query_groups] * attention_by_heads,
            "mla": [self.num_attention_heads] * attention_by_heads,
        }
        if not (heads := [number for mixer in mixers for number in split.get(mixer or "", ())]):
            return None
        shared = max(math.gcd(*heads) // tp_size, 1)
        return shared & -shared
