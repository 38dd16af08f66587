"""Reads the fields of a ModelShape from a Hugging Face `config.json`, by its keys.

One reader serves all models, because families name the same sizes in a few ways only. `FAMILIES` were checked against
the models of `transformers` (tests/model/configs.json). Another type is read in the same way, and a warning says which
keys were used. families.json also names the types and keys of layers whose FLOPs are not known: they are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from megatron_balance.errors import BalanceError
from megatron_balance.model.flops import SIZES
from megatron_balance.model.vision import VisionEncoder

Config = Mapping[str, Any]
Fields = dict[str, Any]

MAX_LAYERS = 10_000
"""No model comes near this limit, to which a file of a few bytes may ask for layers."""

_TABLE, ROWS = (
    cast("dict[str, Any]", json.loads((files(__package__) / f"{name}.json").read_text(encoding="utf-8")))
    for name in ("families", "presets")
)
FAMILIES: dict[str, Config] = {name: {} for name in _TABLE["known"]} | _TABLE["defaults"]
"""Keys that the configuration class of a known model type fills in where a published file leaves them out."""

PRESETS: dict[str, Config] = {name: row["config"] for name, row in ROWS.items()}
"""Named models: the part of each public `config.json` that FLOPs depend on. A row of presets.json also has its
source and the published number of parameters."""

_SYMBOLS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
_NAMES: dict[str, list[str]] = _TABLE["names"]
"""By field of a ModelShape, or by subject, the keys that may hold it: the first that a file has counts. Another name is
the key itself."""


def fields_from_hf_config(config: Config | str | Path) -> tuple[Fields, str]:
    """Keyword arguments of ModelShape, and what to warn of."""
    whole = config if isinstance(config, Mapping) else _load(Path(config))
    text = next((whole[name] for name in ("text_config", "llm_config") if isinstance(whole.get(name), Mapping)), whole)
    model_type = str(text.get("model_type", whole.get("model_type")))
    keys, notes = _Keys(text, model_type), list[str]()
    try:
        keys.refuse(model_type in _TABLE["refused"], _TABLE["refused"].get(model_type))
        for key, reason in _TABLE["refused_keys"].items():
            keys.refuse(keys.get(key), reason)
        fields = _fields(keys)
        if model_type not in FAMILIES:
            notes.append(
                f"model_type {model_type!r} is not known: the Hugging Face config was read as in Llama, by its keys "
                f"{', '.join(sorted(keys.used))}."
            )
        if vision := whole.get("vision_config") or whole.get("audio_config"):
            fields["vision"] = _encoder(_Keys(vision, str(whole.get("model_type"))))
            if fields["vision"] is None:
                notes.append(f"the vision or audio tower of model_type {whole.get('model_type')!r} is not counted.")
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise BalanceError(
            f"the Hugging Face config of model_type {model_type!r} has a value of a wrong kind: {error}."
        ) from error
    return fields, " ".join(notes)


class _Keys:
    """A configuration's values, by fields of a ModelShape or by their own keys, and the keys that were used."""

    def __init__(self, config: Config, model_type: str) -> None:
        values = {key: value for key, value in config.items() if value is not None}
        self._values: Config = {**FAMILIES.get(model_type, {}), **values}
        self.model_type = model_type
        self.used: set[str] = set()

    def get(self, name: str, *, default: Any = None) -> Any:
        key = next((key for key in _NAMES.get(name, [name]) if key in self._values), None)
        if key is None:
            return default
        self.used.add(key)
        return self._values[key]

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise BalanceError(
                f"{' or '.join(_NAMES.get(name, [name]))} is missing in the Hugging Face config of model_type "
                f"{self.model_type!r}: add it, give ModelShape its fields by hand, or balance by tokens."
            )
        return value

    def listed(self, name: str, vocabulary: set[str]) -> list[str]:
        """A word of the vocabulary for each layer; none where the file has no list."""
        words: list[str] = list(self.get(name, default=()))
        unknown = sorted({*words} - vocabulary)
        self.refuse(unknown, f"{name} {unknown}")
        return words

    def refuse(self, holds: object, reason: str) -> None:
        """Refuse the file if a reason holds."""
        if holds:
            raise BalanceError(
                f"the Hugging Face config of model_type {self.model_type!r} has {reason}, whose FLOPs are not known: "
                "balance by tokens or by measured costs."
            )


def _load(path: Path) -> Config:
    file = path / "config.json" if path.is_dir() else path
    try:
        content: object = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise BalanceError(f"{file} cannot be read as a Hugging Face config.json: {error}") from error
    if not isinstance(content, dict):
        raise BalanceError(f"{file} holds a JSON {type(content).__name__}: a config.json holds an object.")
    return cast("Config", content)


def _fields(keys: _Keys) -> Fields:
    # Nemotron-H has a symbol or a name for each layer, which is one mixer or one MLP.
    pattern = keys.get("hybrid_override_pattern") or "".join(
        _SYMBOLS.get(kind, "?") for kind in keys.get("layers_block_type", default=())
    )
    kinds = [] if pattern else _layer_kinds(keys)
    hidden_size, heads = keys.need("hidden_size"), keys.need("num_attention_heads")
    # Newer models leave the gate out with these activations; GELU by tanh has one in Gemma.
    is_gated = keys.get("activation") not in ("relu2", "xielu", "relu", "gelu", "gelu_new")
    result: Fields = {name: keys.get(name, default=0) for name in SIZES} | {
        "hidden_size": hidden_size,
        "num_layers": len(pattern or kinds),
        "num_attention_heads": heads,
        "num_query_groups": keys.get("num_query_groups", default=heads),
        "kv_channels": keys.get("kv_channels") or hidden_size // heads,
        "padded_vocab_size": keys.need("padded_vocab_size"),
        "gated_linear_unit": bool(keys.get("gated_mlp", default=is_gated)),
        "attention_output_gate": bool(keys.get("attn_output_gate")),
        "multi_latent_attention": bool(keys.get("kv_lora_rank")),
        "hybrid_layer_pattern": pattern,
        # Hugging Face counts the query's own token in the window, FlashAttention and Megatron do not.
        "window_size": (keys.need("sliding_window") - 1, 0) if "sliding_attention" in kinds else None,
    }
    latent, width = result["multi_latent_attention"], result["kv_channels"]
    keys.refuse(latent and "linear_attention" in kinds, "linear attention beside latent attention")
    keys.refuse(not latent and keys.get("v_head_dim", default=width) != width, "values of another width than keys")
    if result["num_experts"]:
        result |= _experts(keys, result["num_layers"])
    else:
        result["moe_router_topk"] = 0
    for name, kind in (("window_attn_skip_freq", "sliding"), ("linear_attention_freq", "linear")):
        if f"{kind}_attention" in kinds:
            result[name] = tuple(int(mixer == f"{kind}_attention") for mixer in kinds)
    return result


def _layer_kinds(keys: _Keys) -> list[str]:
    """The token mixer of each layer, from a list or from the family's rule."""
    if (num_layers := keys.need("num_hidden_layers")) > MAX_LAYERS:
        raise BalanceError(f"num_hidden_layers is {num_layers} in the Hugging Face config: give at most {MAX_LAYERS}.")
    mixers = {"full_attention", "sliding_attention", "linear_attention", "indexed_attention"}
    listed = keys.listed("layer_types", mixers)
    # Without a list layers repeat a period: letters, G for attention to all, or a number, the last of which is G.
    local_mixer, period = "linear_attention", keys.get("full_attention_interval")
    if not period and keys.get("sliding_window") and keys.get("use_sliding_window", default=True):
        local_mixer, period = "sliding_attention", keys.get("period of windows")
        keys.refuse(not listed and not period, "a sliding_window without layer_types, and so layers")
    pattern = period if isinstance(period, str) else "L" * (min(period or 1, num_layers + 1) - 1) + "G"
    kinds = listed or ["full_attention" if pattern[i % len(pattern)] == "G" else local_mixer for i in range(num_layers)]
    if len(kinds) != num_layers:
        raise BalanceError(
            f"layer_types has {len(kinds)} entries in the Hugging Face config: num_hidden_layers is {num_layers}."
        )
    keys.refuse("indexed_attention" in kinds and len(set(kinds)) > 1, "sparse attention in some layers only")
    return kinds


def _experts(keys: _Keys, num_layers: int) -> Fields:
    listed = keys.listed("mlp_layer_types", {"dense", "sparse"})
    first = keys.get("first MoE layer", default=0)
    is_moe = [kind == "sparse" for kind in listed] or [index >= first for index in range(num_layers)]
    width = keys.get("moe_ffn_hidden_size") or keys.need("intermediate_size" if all(is_moe) else "moe_ffn_hidden_size")
    shared = keys.get("number of shared experts", default=0) * width
    return {
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": keys.get("moe_shared_expert_intermediate_size", default=shared),
        "moe_layer_freq": () if all(is_moe) else tuple(map(int, is_moe)),
    }


def _encoder(keys: _Keys) -> VisionEncoder | None:
    """The encoder of a Qwen-VL model; None for any other."""
    if not keys.model_type.startswith(("qwen2_5_vl", "qwen3_vl", "qwen3_5")):
        return None
    merged, patch_size = keys.need("spatial_merge_size") ** 2, keys.need("patch_size")
    window, depth, hidden_size = keys.get("window_size", default=0), keys.need("depth"), keys.need("hidden_size")
    return VisionEncoder(
        hidden_size=hidden_size,
        num_layers=depth,
        ffn_hidden_size=keys.need("intermediate_size"),
        gated_linear_unit=keys.model_type.startswith("qwen2_5_vl"),
        patch_values=keys.need("channels") * keys.need("temporal_patch_size") * patch_size**2,
        patches_per_token=merged,
        num_projectors=1 + len(keys.get("deepstack_visual_indexes", default=())),
        window_patches=(window // patch_size) ** 2,
        num_windowed_layers=depth - len(keys.need("fullatt_block_indexes")) if window else 0,
    )
