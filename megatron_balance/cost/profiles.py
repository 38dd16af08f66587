"""Published rates of GPUs: profiles.json, made and judged by `scripts/bench rates`.

A profile belongs to a GPU, a precision, a kind of model, an attention kernel and a software version: the same GPU has
others in the next release. What its source does not say is absent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from megatron_balance.errors import BalanceError


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Rates of one GPU in training.

    Attributes:
        gpu: its name.
        precision: of matrix products, `bf16` or `fp8`.
        models: `dense` or `moe`.
        linear_tflops: rate of all that is linear in tokens, 10**12 FLOP/s.
        attention_tflops: rate of the causal attention core, forward and backward.
        kind: `end to end` (whole runs), `kernel` (attention measured, the rest assumed), `assumed attention`, or
            `own run` (measured by `scripts/bench gpu`).
        source: repository and commit, or paper.
        kernel: of attention, where the source names it.
        software: and its version, where the source names it.
        held_out: mean and worst relative error on published rows that were not fitted; None where none are left.
    """

    gpu: str
    precision: str
    models: str
    linear_tflops: float
    attention_tflops: float
    kind: str
    source: str
    kernel: str | None = None
    software: str | None = None
    held_out: Sequence[float] | None = None

    @property
    def attention_rate(self) -> float:
        """Rate of attention over the linear rate; FLOPs count 1."""
        return self.attention_tflops / self.linear_tflops


@cache
def profiles() -> dict[str, Profile]:
    """All profiles, by name."""
    rows = json.loads((files(__package__) / "profiles.json").read_text(encoding="utf-8"))
    return {name: Profile(**row) for name, row in rows.items()}


def find_profile(name: str) -> Profile:
    """The profile of a name.

    Raises:
        BalanceError: there is none; a GPU's name alone is not enough.
    """
    if name not in profiles():
        raise BalanceError(
            f"the device (--device) is {name!r}: rates belong to a GPU, a precision and a software version, give one "
            f"of {', '.join(profiles())}, or measure your own run (megatron-balance fit)."
        )
    return profiles()[name]


ATTENTION_RATES = {("dense", "bf16"): 0.6, ("dense", "fp8"): 0.4, ("moe", "bf16"): 2.0, ("moe", "fp8"): 2.0}
"""The attention rate that loses least over all profiles of a kind of model and a precision (`scripts/bench rates`)."""


def default_attention_rate(*, has_experts: bool, fp8: bool) -> float:
    """The rate of attention over the linear rate to plan with where none was measured."""
    return ATTENTION_RATES["moe" if has_experts else "dense", "fp8" if fp8 else "bf16"]
