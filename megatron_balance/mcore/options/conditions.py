"""Conditions on Megatron's namespace, parsed or validated; an option that a release lacks counts as not given."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata
from typing import Any

Condition = Callable[[Any], bool]


def given(*names: str) -> Condition:
    """One of these options has a value that is neither empty nor false."""
    return lambda args: any(bool(getattr(args, name, None)) for name in names)


def among(name: str, *values: str) -> Condition:
    """The option has one of these values, or is a list that holds one."""

    def holds(args: Any) -> bool:
        value = getattr(args, name, None)
        return any(_text(item) in values for item in (value if isinstance(value, list) else [value]))

    return holds


def above(name: str, limit: float) -> Condition:
    """The option is a number above a limit."""

    def holds(args: Any) -> bool:
        value = getattr(args, name, None)
        return isinstance(value, int | float) and value > limit

    return holds


def engine_before(*release: int) -> Condition:
    """Layers are Transformer Engine's, and the release installed here is older, as `(major, minor)`."""

    def holds(args: Any) -> bool:
        if getattr(args, "transformer_impl", None) != "transformer_engine":
            return False
        try:
            installed = metadata.version("transformer-engine")
        except metadata.PackageNotFoundError:
            return False  # Megatron says so itself
        return tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) < release

    return holds


def megatron_before(*release: int) -> Condition:
    """The release of Megatron Core installed here is older, as `(major, minor)`."""

    def holds(_: Any) -> bool:
        try:
            installed = metadata.version("megatron-core")
        except metadata.PackageNotFoundError:
            return False  # a checkout on the search path; hooks check its version
        return tuple(int(number) for number in re.findall(r"\d+", installed)[:2]) < release

    return holds


def both(*conditions: Condition) -> Condition:
    """All of these conditions hold."""
    return lambda args: all(condition(args) for condition in conditions)


def either(*conditions: Condition) -> Condition:
    """One of these conditions holds."""
    return lambda args: any(condition(args) for condition in conditions)


def negated(condition: Condition) -> Condition:
    """The condition does not hold."""
    return lambda args: not condition(args)


BALANCING: Condition = given("use_dynamic_batch_size", "balance_data")
"""Some flag asks for balancing."""


def unpads(args: Any) -> bool:
    """`--balance-unpad` is given; 0 is a token id."""
    return getattr(args, "balance_unpad", None) is not None


def experts_span_replicas(args: Any) -> bool:
    """Ranks that exchange tokens in MoE layers hold different micro-batches.

    Megatron forms expert groups of `etp*ep` consecutive ranks; `tp*cp` consecutive ranks share a micro-batch.
    """
    return _expert_group_spans_replicas(args, _expert_tensor_size(args) * _size(args, "expert_model_parallel_size"))


def experts_span_ranks(args: Any) -> bool:
    """Experts are spread over more ranks than share every token: tensor-parallel ones."""
    group_size = _expert_tensor_size(args) * _size(args, "expert_model_parallel_size")
    return bool(getattr(args, "num_experts", None)) and _size(args, "tensor_model_parallel_size") % group_size != 0


def expert_tensors_span_replicas(args: Any) -> bool:
    """Ranks that hold parts of one expert hold different micro-batches."""
    return _expert_group_spans_replicas(args, _expert_tensor_size(args))


def weights_are_sharded_over_data(args: Any) -> bool:
    """Ranks that hold shards of one weight hold different micro-batches.

    Validation sets both numbers of shards to the tensor-parallel sizes, where they are not given.
    """
    tp_size, etp_size = _size(args, "tensor_model_parallel_size"), _expert_tensor_size(args)
    of_weights = _size(args, "tensor_parallel_num_weight_shards", default=tp_size)
    of_experts = _size(args, "expert_tensor_parallel_num_weight_shards", default=etp_size)
    return of_weights > tp_size or of_experts > etp_size


def _expert_group_spans_replicas(args: Any, group_size: int) -> bool:
    sharing = _size(args, "tensor_model_parallel_size") * _size(args, "context_parallel_size")
    return bool(getattr(args, "num_experts", None)) and sharing % group_size != 0


def _expert_tensor_size(args: Any) -> int:
    return _size(args, "expert_tensor_parallel_size", default=_size(args, "tensor_model_parallel_size"))


def _size(args: Any, name: str, *, default: int = 1) -> int:
    """A number of ranks; the default where the option is missing, or the namespace is not Megatron's."""
    return getattr(args, name, None) or default


def _text(value: Any) -> str:
    return str(getattr(value, "name", value))
