"""Reads the fields of a ModelShape from Megatron's parsed arguments, or from a TransformerConfig.

Read as Megatron 0.19 reads them: `validate_args` (megatron/training/arguments.py) for the defaults,
`core_transformer_config_from_args` for the gate, and where each pattern is used for its meaning:

    --moe-layer-freq N           layer i is MoE where i % N == 0                       (gpt_layer_specs)
    --linear-attention-freq N    every N-th layer is full attention, the others linear (experimental_attention_...)
    --window-attn-skip-freq N    every N-th layer is full attention, the others windowed (is_layer_window_attention)

Each also takes a list. Nothing of Megatron is imported here.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import SIZES, hybrid_parts

_REFUSED = (
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_block_specs",
)


def fields_from_megatron_args(args: object) -> dict[str, Any]:
    """Keyword arguments of ModelShape from a Megatron Namespace; arguments that it does not have count as not given."""

    def get(name: str) -> Any:
        return getattr(args, name, None) or 0

    def need(name: str) -> int:
        value = getattr(args, name, None)
        if value is None:
            raise BalanceError(f"{_flag(name)} is not given: FLOPs cannot be counted without it.")
        return value

    def pattern(name: str, periodic: Callable[[int, int], bool]) -> tuple[int, ...]:
        value = get(name)
        if isinstance(value, int):
            return tuple(int(periodic(index, value)) for index in range(num_layers)) if value else ()
        return tuple(map(int, value))

    variant = get("experimental_attention_variant")
    if variant not in (0, "gated_delta_net", "dsa"):
        raise BalanceError(
            f"--experimental-attention-variant is {variant!r}: the FLOPs of gated_delta_net and dsa are known; "
            "balance by tokens or by measured costs."
        )
    for name in filter(get, _REFUSED):
        raise BalanceError(
            f"{_flag(name)} is given: the FLOPs of layers of different sizes are not known; "
            "balance by tokens or by measured costs."
        )
    hidden_size, heads = need("hidden_size"), need("num_attention_heads")
    # --hybrid-override-pattern is the older name; validate_args moves it.
    hybrid = get("hybrid_layer_pattern") or get("hybrid_override_pattern") or ""
    main, *depths = hybrid_parts(hybrid)
    num_layers = len(main) if hybrid else need("num_layers")
    # validate_args: with SwiGLU two thirds of 4h, a multiple of 64, so that the parameters stay as many.
    ffn_hidden_size = get("ffn_hidden_size") or (8 * hidden_size // 3 // 64 * 64 if get("swiglu") else 4 * hidden_size)
    # Megatron pads once its tokenizer is built; before that --vocab-size may be all there is.
    multiple = (get("make_vocab_size_divisible_by") or 128) * (get("tensor_model_parallel_size") or 1)
    latent = bool(get("multi_latent_attention")) or not {"+", "D"}.isdisjoint(hybrid)
    result: dict[str, Any] = {
        **{name: get(name) for name in SIZES},
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_attention_heads": heads,
        "num_query_groups": need("num_query_groups") if get("group_query_attention") and not latent else heads,
        "kv_channels": get("kv_channels") or hidden_size // heads,
        "ffn_hidden_size": ffn_hidden_size,
        "padded_vocab_size": get("padded_vocab_size") or -(-need("vocab_size") // multiple) * multiple,
        "gated_linear_unit": bool(get("swiglu") or get("quick_geglu")),
        "attention_output_gate": bool(get("attention_output_gate")),
        "multi_latent_attention": latent,
        "hybrid_layer_pattern": hybrid,
        "lora_rank": get("lora_rank"),  # no flag of Megatron's: Bridge's configuration has it
        "mtp_num_layers": len(depths) if hybrid else get("mtp_num_layers"),
    }
    if get("window_size"):
        result["window_size"] = tuple(get("window_size"))
        result["window_attn_skip_freq"] = pattern("window_attn_skip_freq", lambda i, n: (i + 1) % n != 0)
    # Some sizes have a default where no layer has them.
    if not (variant == "dsa" or "D" in hybrid):
        result["dsa_indexer_topk"] = 0
    if get("num_experts"):
        result["moe_ffn_hidden_size"] = get("moe_ffn_hidden_size") or ffn_hidden_size
        result["moe_layer_freq"] = pattern("moe_layer_freq", lambda i, n: i % n == 0)
    else:
        result["moe_router_topk"] = 0
    if variant == "gated_delta_net":
        need("linear_attention_freq")
        result["linear_attention_freq"] = pattern("linear_attention_freq", lambda i, n: (i + 1) % n != 0)
    if "M" in hybrid:
        # Without a number Megatron takes the heads that fill twice the hidden size (MambaMixer, expand=2).
        result["mamba_num_heads"] = get("mamba_num_heads") or 2 * hidden_size // need("mamba_head_dim")
    return result


def fields_from_transformer_config(
    config: object, *, padded_vocab_size: int, hybrid_layer_pattern: str
) -> dict[str, Any]:
    """The same from a TransformerConfig of megatron.core; its `__post_init__` has filled in the defaults."""
    values: dict[str, Any] = dict(getattr(config, "__dict__", {}))
    if values.get("is_hybrid_model") and not hybrid_layer_pattern:
        raise BalanceError(
            "hybrid_layer_pattern is not given: the configuration is a hybrid model's and does not say which "
            "layers it has; pass --hybrid-layer-pattern."
        )
    values |= {
        "num_experts": values.get("num_moe_experts"),
        # A pattern equal to the default is left out, as in ModelShape.
        "moe_layer_freq": None if values.get("moe_layer_freq") == 1 else values.get("moe_layer_freq"),
        "group_query_attention": True,
        "swiglu": values.get("gated_linear_unit"),
        "padded_vocab_size": padded_vocab_size,
        "hybrid_layer_pattern": hybrid_layer_pattern,
    }
    # Argument parsing takes 0 for "not given"; here it is what the layers are built with.
    return fields_from_megatron_args(Namespace(**values)) | {"ffn_hidden_size": values.get("ffn_hidden_size")}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
