"""Reads the fields of a ModelShape from a Hugging Face `config.json`.

One reader per family; `_READERS` names them. What a key means is what the family's modeling file in
`transformers` does with it. Where a family's published files leave a key out because the configuration
class has a default, `_DEFAULTS` holds that default. Vision towers are read in hf_vision.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from megatron_balance.errors import BalanceError
from megatron_balance.files.untrusted import parse_json
from megatron_balance.model.hf_vision import ENCODERS

Config = Mapping[str, Any]
Fields = dict[str, Any]

MAX_LAYERS = 10_000
"""Patterns have an entry a layer; no model comes near this limit."""

_DEFAULTS: dict[str, Config] = {
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_next": {"head_dim": 256},
    "qwen3_5_text": {"head_dim": 256, "vocab_size": 248320},
    "qwen3_5_moe_text": {"head_dim": 256, "vocab_size": 248320},
    "gpt_oss": {"head_dim": 64},
}


def fields_from_hf_config(config: Config | str | Path) -> Fields:
    """Fields of a ModelShape from a Hugging Face configuration.

    Args:
        config: its content, its path, or the path of the folder that holds `config.json`.

    Returns:
        dict: keyword arguments of ModelShape.

    Raises:
        BalanceError: the file cannot be read, or its model_type or one of its keys is not known here.
    """
    content = config if isinstance(config, Mapping) else _load(Path(config))
    whole = content
    if isinstance(content.get("text_config"), Mapping):
        content = cast("Config", content["text_config"])
    model_type = content.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise BalanceError(
            f"model_type is {model_type!r} in the Hugging Face config: {', '.join(_READERS)} are known. "
            "Give ModelShape its fields by hand, or balance by tokens or by calibrated costs."
        )
    if isinstance(num_layers := content.get("num_hidden_layers"), int) and num_layers > MAX_LAYERS:
        raise BalanceError(
            f"num_hidden_layers is {num_layers} in the Hugging Face config: at most {MAX_LAYERS} are read."
        )
    try:
        result = _READERS[model_type]({**_DEFAULTS.get(model_type, {}), **content})
        encoder = ENCODERS.get(whole.get("model_type", ""))
        if encoder is not None and whole.get("vision_config"):
            result["vision"] = encoder(whole["vision_config"], result["hidden_size"])
        return result
    except BalanceError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BalanceError(
            f"the Hugging Face config of model_type {model_type!r} has a value of a wrong kind: {error}."
        ) from error


def _load(path: Path) -> Config:
    file = path / "config.json" if path.is_dir() else path
    try:
        content: object = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BalanceError(f"{file} cannot be read as a Hugging Face config.json: {error}") from error
    if not isinstance(content, dict):
        raise BalanceError(f"{file} holds a JSON {type(content).__name__}: a config.json holds an object.")
    return cast("Config", content)


def _need(config: Config, key: str) -> Any:
    if config.get(key) is None:
        raise BalanceError(f"{key} is missing in the Hugging Face config of model_type {config['model_type']!r}.")
    return config[key]


def _base(config: Config) -> Fields:
    """The fields that all families share: grouped-query attention and a gated MLP."""
    heads: int = _need(config, "num_attention_heads")
    return {
        "hidden_size": _need(config, "hidden_size"),
        "num_layers": _need(config, "num_hidden_layers"),
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or _need(config, "hidden_size") // heads,
        "ffn_hidden_size": config.get("intermediate_size") or 0,
        "padded_vocab_size": _need(config, "vocab_size"),
        "gated_linear_unit": True,
    }


def _layer_types(config: Config, default: Callable[[int], str]) -> Fields:
    """Windows and linear attention, from `layer_types` or, in older files, from the family's rule."""
    types: list[str] = config.get("layer_types") or [default(i) for i in range(_need(config, "num_hidden_layers"))]
    unknown = set(types) - {"full_attention", "sliding_attention", "linear_attention"}
    if unknown:
        raise BalanceError(
            f"layer_types has {sorted(unknown)}: only full_attention, sliding_attention and linear_attention are "
            "known; balance by tokens or by calibrated costs."
        )
    result: Fields = {}
    if "sliding_attention" in types:
        # Hugging Face counts the query's own token in the window, FlashAttention and Megatron do not.
        result["window_size"] = (_need(config, "sliding_window") - 1, 0)
        result["window_attn_skip_freq"] = tuple(int(kind == "sliding_attention") for kind in types)
    if "linear_attention" in types:
        result["linear_attention_freq"] = tuple(int(kind == "linear_attention") for kind in types)
        names = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")
        result |= {f"linear_{name}": _need(config, f"linear_{name}") for name in names}
    return result


def _experts(config: Config, *, count: str, width: str, shared: int = 0) -> Fields:
    return {
        "num_experts": _need(config, count),
        "moe_router_topk": _need(config, "num_experts_per_tok"),
        "moe_ffn_hidden_size": _need(config, width),
        "moe_shared_expert_intermediate_size": shared,
    }


def _llama(config: Config) -> Fields:
    return _base(config) | _layer_types(config, lambda _: "full_attention")


def _mistral(config: Config) -> Fields:
    kind = "sliding_attention" if config.get("sliding_window") else "full_attention"
    return _base(config) | _layer_types(config, lambda _: kind)


def _mixtral(config: Config) -> Fields:
    return _mistral(config) | _experts(config, count="num_local_experts", width="intermediate_size")


def _qwen(config: Config) -> Fields:
    # use_sliding_window is false in every published file; max_window_layers layers stay full where it is true.
    windowed, first = bool(config.get("use_sliding_window")), config.get("max_window_layers") or 0
    return _base(config) | _layer_types(
        config, lambda i: "sliding_attention" if windowed and i >= first else "full_attention"
    )


def _qwen_experts(config: Config) -> Fields:
    dense: list[int] = config.get("mlp_only_layers") or []
    step: int = config.get("decoder_sparse_step") or 1
    layers = range(_need(config, "num_hidden_layers"))
    shared: int = config.get("shared_expert_intermediate_size") or 0
    return _experts(config, count="num_experts", width="moe_intermediate_size", shared=shared) | {
        "moe_layer_freq": tuple(int(i not in dense and (i + 1) % step == 0) for i in layers)
    }


def _qwen_moe(config: Config) -> Fields:
    return _qwen(config) | _qwen_experts(config)


def _qwen_linear(config: Config) -> Fields:
    """Three gated delta net layers, then one of attention with an output gate (Qwen3-Next, Qwen3.5)."""
    interval: int = config.get("full_attention_interval") or 4
    types = _layer_types(config, lambda i: "linear_attention" if (i + 1) % interval else "full_attention")
    return _base(config) | types | {"attention_output_gate": True}


def _qwen_linear_moe(config: Config) -> Fields:
    return _qwen_linear(config) | _qwen_experts(config)


def _gemma3(config: Config) -> Fields:
    period: int = config.get("sliding_window_pattern") or 6
    return _base(config) | _layer_types(config, lambda i: "sliding_attention" if (i + 1) % period else "full_attention")


def _gpt_oss(config: Config) -> Fields:
    types = _layer_types(config, lambda i: "full_attention" if i % 2 else "sliding_attention")
    return _base(config) | types | _experts(config, count="num_local_experts", width="intermediate_size")


def _deepseek(config: Config) -> Fields:
    first: int = config.get("first_k_dense_replace") or 0
    step: int = config.get("moe_layer_freq") or 1
    width: int = _need(config, "moe_intermediate_size")
    shared: int = (config.get("n_shared_experts") or 0) * width
    # Keys and values are one latent vector: head_dim and num_key_value_heads mean nothing here.
    fields = _base({**config, "head_dim": None, "num_key_value_heads": None})
    fields |= _experts(config, count="n_routed_experts", width="moe_intermediate_size", shared=shared)
    return fields | {
        "moe_layer_freq": tuple(int(i >= first and i % step == 0) for i in range(fields["num_layers"])),
        "multi_latent_attention": True,
        "q_lora_rank": config.get("q_lora_rank") or 0,
        "kv_lora_rank": _need(config, "kv_lora_rank"),
        "qk_head_dim": _need(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": _need(config, "qk_rope_head_dim"),
        "v_head_dim": _need(config, "v_head_dim"),
    }


def _deepseek_sparse(config: Config) -> Fields:
    return _deepseek(config) | {
        "dsa_indexer_n_heads": _need(config, "index_n_heads"),
        "dsa_indexer_head_dim": _need(config, "index_head_dim"),
        "dsa_indexer_topk": _need(config, "index_topk"),
    }


def _nemotron_h(config: Config) -> Fields:
    pattern: str = config.get("hybrid_override_pattern") or ""
    if not pattern:
        symbols = {
            "linear_attention": "M",
            "mamba": "M",
            "full_attention": "*",
            "attention": "*",
            "mlp": "-",
            "moe": "E",
        }
        kinds: list[str] = _need(config, "layers_block_type")
        pattern = "".join(symbols.get(kind, "?") for kind in kinds)
    head_dim = config.get("head_dim") or config.get("attention_head_dim")
    fields = _base({**config, "head_dim": head_dim, "num_hidden_layers": len(pattern)})
    if "E" in pattern:
        shared: int = config.get("moe_shared_expert_intermediate_size") or 0
        fields |= _experts(config, count="n_routed_experts", width="moe_intermediate_size", shared=shared)
        fields["moe_latent_size"] = config.get("moe_latent_size") or 0
    return fields | {
        "gated_linear_unit": False,
        "hybrid_layer_pattern": pattern,
        "mamba_state_dim": _need(config, "ssm_state_size"),
        "mamba_head_dim": _need(config, "mamba_head_dim"),
        "mamba_num_groups": _need(config, "n_groups"),
        "mamba_num_heads": _need(config, "mamba_num_heads"),
    }


_READERS: dict[str, Callable[[Config], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen2_5_vl_text": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen_moe,
    "qwen3_next": _qwen_linear_moe,
    "qwen3_5_text": _qwen_linear,
    "qwen3_5_moe_text": _qwen_linear_moe,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek_sparse,
    "nemotron_h": _nemotron_h,
}
