"""Bytes per number in training.

Invariant: every number of bytes is a positive integer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from megatron_balance.errors import BalanceError


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per number, and the fused kernels and extra tensors of a run.

    Attributes:
        activation: of an activation (bf16: 2).
        weight: of a weight as the layers use it.
        gradient: of an accumulated gradient (`--accumulate-allreduce-grads-in-fp32`, the default under bf16: 4).
        optimizer: of what the optimizer keeps for a weight: fp32 copy and both Adam moments under bf16.
        fused: norms, rotary angles and gated activations are one kernel each, as with Transformer Engine and
            Megatron's default flags.
        qk_layernorm: queries and keys, or MLA's latent vectors, are normed (`--qk-layernorm`), which keeps them twice.
        hidden_dropout: there is hidden dropout, which keeps a mask of one byte a number.

    Raises:
        BalanceError: a number of bytes is not a positive integer.

    Example:
        >>> Precision.fp32().optimizer
        8
    """

    activation: int = 2
    weight: int = 2
    gradient: int = 4
    optimizer: int = 12
    fused: bool = True
    qk_layernorm: bool = True
    hidden_dropout: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise BalanceError(f"Precision.{field.name} is {value!r}: it must be a positive number of bytes.")

    @classmethod
    def fp32(cls) -> Precision:
        """Training in fp32: the optimizer needs no copy of the weights."""
        return cls(activation=4, weight=4, gradient=4, optimizer=8)
