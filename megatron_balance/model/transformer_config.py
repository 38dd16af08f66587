"""Reads the fields of a ModelShape from Megatron's TransformerConfig or MLATransformerConfig.

The configuration has other names than `megatron_args.py` for experts and the gate, and lacks what is outside the
layers: vocabulary and hybrid pattern. Nothing of Megatron is imported here.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron_balance.errors import BalanceError
from megatron_balance.model.megatron_args import fields_from_megatron_args


def fields_from_transformer_config(
    config: object, *, padded_vocab_size: int, hybrid_layer_pattern: str = ""
) -> dict[str, Any]:
    """Fields of a ModelShape from a configuration of megatron.core.

    Args:
        config: a TransformerConfig; its `__post_init__` has filled in the defaults.
        padded_vocab_size: rows of the output projection.
        hybrid_layer_pattern: one symbol a layer, for a hybrid model.

    Returns:
        dict: keyword arguments of ModelShape.

    Raises:
        BalanceError: config is not a TransformerConfig, or its layers' FLOPs are not known here.
    """
    values = _values(config)
    if values["is_hybrid_model"] and not hybrid_layer_pattern:
        raise BalanceError(
            "hybrid_layer_pattern is not given: the configuration is a hybrid model's and does not say which "
            "layers it has; pass --hybrid-layer-pattern."
        )
    if values["heterogeneous_block_specs"]:
        raise BalanceError(
            "heterogeneous_block_specs is set: the FLOPs of layers of different sizes are not known; balance by "
            "tokens or by calibrated costs."
        )
    args = args_of_transformer_config(
        config, padded_vocab_size=padded_vocab_size, hybrid_layer_pattern=hybrid_layer_pattern
    )
    # Argument parsing takes 0 for "not given"; here it is what the layers are built with.
    return fields_from_megatron_args(args) | {"ffn_hidden_size": values["ffn_hidden_size"]}


def args_of_transformer_config(
    config: object, *, padded_vocab_size: int | None, hybrid_layer_pattern: str = ""
) -> Namespace:
    """The fields of a configuration under the names of Megatron's arguments.

    Args:
        config: as for `fields_from_transformer_config`.
        padded_vocab_size: likewise; None where it is not known.
        hybrid_layer_pattern: likewise.

    Raises:
        BalanceError: config is not a TransformerConfig.
    """
    values = _values(config)
    # A pattern equal to the default is left out, as in ModelShape.
    every_layer = values["moe_layer_freq"] == 1
    return Namespace(
        **values
        | {
            "num_experts": values["num_moe_experts"],
            "moe_layer_freq": None if every_layer else values["moe_layer_freq"],
            "group_query_attention": True,
            "swiglu": values["gated_linear_unit"],
            "padded_vocab_size": padded_vocab_size,
            "hybrid_layer_pattern": hybrid_layer_pattern,
        }
    )


def _values(config: object) -> dict[str, Any]:
    values: dict[str, Any] = dict(getattr(config, "__dict__", {}))
    needed = (
        "ffn_hidden_size",
        "gated_linear_unit",
        "num_moe_experts",
        "moe_layer_freq",
        "is_hybrid_model",
        "heterogeneous_block_specs",
    )
    missing = [name for name in needed if name not in values]
    if missing:
        raise BalanceError(
            f"config is a {type(config).__name__} without {missing[0]}: it must be megatron.core's TransformerConfig "
            "(the `transformer` of a GPTModelConfig)."
        )
    return values
