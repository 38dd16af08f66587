"""Reads the fields of a ModelShape from Megatron's parsed arguments, or from a TransformerConfig.

Read as Megatron 0.19 reads them: `validate_args` (megatron/training/arguments.py) for the defaults,
`core_transformer_config_from_args` for the gate, and where each pattern is used for its meaning:

    --moe-layer-freq N           layer i is MoE where i % N == 0                       (gpt_layer_specs)
    --linear-attention-freq N    every N-th layer is full attention, the others linear (experimental_attention_...)
    --window-attn-skip-freq N    every N-th layer is full attention, the others windowed (is_layer_window_attention)
    --dsa-indexer-topk-freq N    every N-th layer picks keys for those after it        (is_dsa_skip_topk_layer)

The first three also take a list, or a string such as "[0]*3+[1]*58". A configuration has other names for experts and
the gate, and lacks vocabulary and hybrid pattern. Nothing of Megatron is imported here.
"""

from __future__ import annotations

import ast
import operator
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import NEEDED

_COPIED = {
    "experts": ("num_experts", "moe_router_topk", "moe_shared_expert_intermediate_size", "moe_latent_size"),
    "mla": ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "dsa": ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    "gated_delta_net": NEEDED["gated_delta_net"],
    "mamba": ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups"),
}
"""Arguments copied where the model has such layers: Megatron gives many a default in any case."""

_REFUSED = (
    "heterogeneous_layers_config_path",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_block_specs",
)


def fields_from_megatron_args(args: object) -> dict[str, Any]:
    """Keyword arguments of ModelShape from a Megatron Namespace; arguments that it does not have count as not given."""
    variant = getattr(args, "experimental_attention_variant", None)
    if variant not in (None, "gated_delta_net", "dsa"):
        raise BalanceError(
            f"--experimental-attention-variant is {variant!r}: the FLOPs of gated_delta_net and dsa are known; "
            "balance by tokens or by measured costs."
        )
    if given := next((name for name in _REFUSED if getattr(args, name, None)), None):
        raise BalanceError(
            f"{_flag(given)} is given: the FLOPs of layers of different sizes are not known; "
            "balance by tokens or by measured costs."
        )
    hidden_size, heads = _needed(args, "hidden_size"), _needed(args, "num_attention_heads")
    # --hybrid-override-pattern is the older name; validate_args moves it.
    hybrid = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None) or ""
    main, *depths = hybrid.replace("|", "").split("/")
    num_layers = len(main) if hybrid else _needed(args, "num_layers")
    # validate_args: with SwiGLU two thirds of 4h, a multiple of 64, so that the parameters stay as many.
    default = 8 * hidden_size // 3 // 64 * 64 if getattr(args, "swiglu", False) else 4 * hidden_size
    ffn_hidden_size = _int(args, "ffn_hidden_size") or default
    latent = bool(getattr(args, "multi_latent_attention", False)) or not {"+", "D"}.isdisjoint(hybrid)
    grouped = bool(getattr(args, "group_query_attention", False)) and not latent
    kinds = {
        "mla": latent,
        "dsa": variant == "dsa" or "D" in hybrid,
        "experts": _int(args, "num_experts") > 0,
        "gated_delta_net": variant == "gated_delta_net" or "G" in hybrid,
        "mamba": "M" in hybrid,
    }
    result: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_attention_heads": heads,
        "num_query_groups": _needed(args, "num_query_groups") if grouped else heads,
        "kv_channels": _int(args, "kv_channels") or hidden_size // heads,
        "ffn_hidden_size": ffn_hidden_size,
        "padded_vocab_size": _padded_vocab_size(args),
        "gated_linear_unit": bool(getattr(args, "swiglu", False) or getattr(args, "quick_geglu", False)),
        "attention_output_gate": bool(getattr(args, "attention_output_gate", False)),
        "multi_latent_attention": latent,
        "hybrid_layer_pattern": hybrid,
        "lora_rank": _int(args, "lora_rank"),  # no flag of Megatron's: Bridge's configuration has it
        "mtp_num_layers": len([depth for depth in depths if depth]) if hybrid else _int(args, "mtp_num_layers"),
        **{name: _int(args, name) for kind, has in kinds.items() if has for name in _COPIED[kind]},
    }
    if kinds["dsa"]:
        freq, offset = _int(args, "dsa_indexer_topk_freq") or 1, max(_int(args, "dsa_indexer_skip_topk_offset"), 1)
        if freq > 1:  # layers are numbered from 1
            result["dsa_indexer_layers"] = tuple(
                int(max(number - offset, 0) % freq == 0) for number in range(1, num_layers + 1)
            )
        result["dsa_indexer_loss"] = bool(getattr(args, "dsa_indexer_loss_coeff", None))
        result["dsa_fused"] = getattr(args, "dsa_kernel_backend", "none") != "none"
    if window_size := getattr(args, "window_size", None):
        result["window_size"] = tuple(window_size)
        result["window_attn_skip_freq"] = _pattern(
            args, "window_attn_skip_freq", num_layers, lambda i, n: (i + 1) % n != 0
        )
    if kinds["experts"]:
        result["moe_ffn_hidden_size"] = _int(args, "moe_ffn_hidden_size") or ffn_hidden_size
        result["moe_layer_freq"] = _pattern(args, "moe_layer_freq", num_layers, lambda i, n: i % n == 0)
    if variant == "gated_delta_net":
        _needed(args, "linear_attention_freq")
        result["linear_attention_freq"] = _pattern(
            args, "linear_attention_freq", num_layers, lambda i, n: (i + 1) % n != 0
        )
    if kinds["mamba"]:
        # Without a number Megatron takes the heads that fill twice the hidden size (MambaMixer, expand=2).
        head_dim = _needed(args, "mamba_head_dim")
        result["mamba_num_heads"] = _int(args, "mamba_num_heads") or 2 * hidden_size // head_dim
    return result


def fields_from_transformer_config(
    config: object, *, padded_vocab_size: int, hybrid_layer_pattern: str
) -> dict[str, Any]:
    """The same from a TransformerConfig of megatron.core; its `__post_init__` has filled in the defaults."""
    values: dict[str, Any] = dict(getattr(config, "__dict__", {}))
    for name in ("ffn_hidden_size", "gated_linear_unit", "num_moe_experts", "moe_layer_freq", "is_hybrid_model"):
        if name not in values:
            raise BalanceError(
                f"config is a {type(config).__name__} without {name}: it must be megatron.core's TransformerConfig "
                "(the `transformer` of a GPTModelConfig)."
            )
    if values["is_hybrid_model"] and not hybrid_layer_pattern:
        raise BalanceError(
            "hybrid_layer_pattern is not given: the configuration is a hybrid model's and does not say which "
            "layers it has; pass --hybrid-layer-pattern."
        )
    freq = values["moe_layer_freq"]
    renamed = {
        "num_experts": values["num_moe_experts"],
        "moe_layer_freq": None if freq == 1 else freq,  # a pattern equal to the default is left out, as in ModelShape
        "group_query_attention": True,
        "swiglu": values["gated_linear_unit"],
        "padded_vocab_size": padded_vocab_size,
        "hybrid_layer_pattern": hybrid_layer_pattern,
    }
    # Argument parsing takes 0 for "not given"; here it is what the layers are built with.
    fields = fields_from_megatron_args(Namespace(**values | renamed))
    return fields | {"ffn_hidden_size": values["ffn_hidden_size"]}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _needed(args: object, name: str) -> int:
    value = getattr(args, name, None)
    if value is None:
        raise BalanceError(f"{_flag(name)} is not given: FLOPs cannot be counted without it.")
    return value


def _int(args: object, name: str) -> int:
    return getattr(args, name, None) or 0


def _padded_vocab_size(args: object) -> int:
    # Megatron pads once its tokenizer is built; before that --vocab-size may be all there is.
    if padded := _int(args, "padded_vocab_size"):
        return padded
    multiple = (_int(args, "make_vocab_size_divisible_by") or 128) * (_int(args, "tensor_model_parallel_size") or 1)
    return -(-_needed(args, "vocab_size") // multiple) * multiple


def _pattern(args: object, name: str, num_layers: int, periodic: Callable[[int, int], bool]) -> tuple[int, ...]:
    """A frequency argument as one 0 or 1 a layer; () when it is not given."""
    value = getattr(args, name, None)
    if isinstance(value, str):
        value = _evaluated(value, name=name)
    if isinstance(value, int):
        return tuple(int(periodic(index, value)) for index in range(num_layers))
    return tuple(map(int, value or ()))


def _evaluated(text: str, *, name: str) -> int | list[int]:
    """The text of a frequency argument: a number, or lists joined with + and repeated with *."""
    operations: dict[type, Callable[[Any, Any], Any]] = {ast.Add: operator.add, ast.Mult: operator.mul}

    def value(node: Any) -> Any:
        if isinstance(node, ast.BinOp):
            return operations[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.List):
            return [int(value(entry)) for entry in node.elts]
        return operator.index(node.value)

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (AttributeError, LookupError, SyntaxError, TypeError) as error:
        raise BalanceError(
            f"{_flag(name)} is {text!r}: it must be a number, or lists of 0 and 1 such as '[0]*3+[1]*58'."
        ) from error
