"""How long samples are: of what inference gave back, and of a data set that is not inferred yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_balance.errors import BalanceError


def result_length(result: Any) -> int:
    """Tokens of one `InferenceOutput`, from `tensor_shapes["input_ids"]`; 0 where inference gave no shape."""
    shape = (result.tensor_shapes or {}).get("input_ids")
    return int(shape[-1]) if shape else 0


def data_lengths(samples: Sequence[Any]) -> list[int]:
    """Lengths of the samples of a data set, all in one unit.

    Tokens where every sample has `input_ids`, or `seq_len` as an offline record has; characters of
    `formatted_prompt` where tokenization is deferred.

    Raises:
        BalanceError: the samples have none of these.
    """
    for name in ("input_ids", "seq_len", "formatted_prompt"):
        if all(isinstance(sample, Mapping) and sample.get(name) is not None for sample in samples):
            return [_length(sample[name]) for sample in samples]
    raise BalanceError(
        "approach C needs the lengths of the data set, and its samples have neither input_ids, nor seq_len, nor "
        "formatted_prompt: load it with load_conversation_dataset, or use approach B."
    )


def _length(value: Any) -> int:
    if isinstance(value, int):
        return value
    shape = getattr(value, "shape", None)
    return len(value) if shape is None else int(shape[-1])
