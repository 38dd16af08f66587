"""Seconds of micro-batches, fitted to a run and kept in seconds.json.

    seconds = per_microbatch + per_sequence*num_sequences + linear*ΣL + quadratic*ΣL² + Σ_w window_w*Σpairs(L, w)

with `pairs` as in `cost.py`. FLOPs leave out how efficiently a device runs them: attention and GEMMs reach
different fractions of its peak, and every launch costs time of its own.

Invariant: the integers of the cost model keep six digits of every coefficient that matters; they count
attoseconds, which `CostModel.sample_costs` scales down if the sum over a batch exceeds int64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, cast

from megatron_balance.cost.model import CostModel
from megatron_balance.errors import BalanceError
from megatron_balance.files.untrusted import parse_json

FORMAT = "megatron_balance calibration 1"
"""Format name in the file; the number rises with incompatible changes."""

UNITS_PER_SECOND = 10**18
"""A cost of 1 is an attosecond: a squared token costs as little as 1e-15 seconds on the fastest devices."""


@dataclass(frozen=True)
class Calibration:
    """Seconds that a device takes, forward and backward, for the whole model on one rank.

    Attributes:
        per_microbatch: seconds of every micro-batch.
        per_sequence: seconds of every sequence in it.
        linear: seconds per token.
        expert_linear: seconds per token in routed experts, on top of `linear`.
        quadratic: seconds per squared token.
        windows: pairs `(window tokens, seconds per squared token)` of sliding-window attention.
        cp_exchange: seconds per token of keys and values that a rank receives from context-parallel ranks of its own
            node, beyond its part of the computing; None where that was not measured.
        cp_exchange_between_nodes: the same for ranks on several nodes.
        held_out_error: median relative error on micro-batches that were not fitted; None where none were kept.
        origin: conditions of the measurement: device, clock, versions, and `longest_sequence`, the most tokens seen.

    Raises:
        BalanceError: a coefficient is negative or not finite, or all are zero.
    """

    _: KW_ONLY
    per_microbatch: float = 0.0
    per_sequence: float = 0.0
    linear: float = 0.0
    expert_linear: float = 0.0
    quadratic: float = 0.0
    windows: tuple[tuple[int, float], ...] = ()
    cp_exchange: float | None = None
    cp_exchange_between_nodes: float | None = None
    held_out_error: float | None = None
    origin: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        seconds = {name: getattr(self, name) for name in _COEFFICIENTS}
        seconds |= {f"windows[{window}]": value for window, value in self.windows}
        if not any(seconds.values()):
            raise BalanceError("Calibration has no coefficient above zero: every micro-batch would be free.")
        exchanges = {"cp_exchange": self.cp_exchange, "cp_exchange_between_nodes": self.cp_exchange_between_nodes}
        seconds |= {name: value for name, value in exchanges.items() if value is not None}
        for name, value in seconds.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise BalanceError(f"Calibration.{name} is {value!r}: it must be a number of seconds, 0 or more.")

    def __call__(self, lengths: list[int]) -> float:
        """Seconds of one micro-batch of sequences of these lengths, tokens."""
        model = self.cost_model()
        return (model.per_microbatch + sum(model(length) for length in lengths)) / UNITS_PER_SECOND

    def extrapolation(self, longest: int) -> str:
        """A notice where sequences are longer than those that were measured; empty where they are not."""
        seen = self.origin.get("longest_sequence")
        if not isinstance(seen, int) or longest <= seen:
            return ""
        return f"the costs were measured on sequences of up to {seen} tokens: up to {longest} is extrapolated."

    def exchange_seconds(self, *, between_nodes: bool) -> float | None:
        """Seconds to receive a token's keys and values; None if they were not measured.

        Args:
            between_nodes: context-parallel ranks are on several nodes.
        """
        return self.cp_exchange_between_nodes if between_nodes else self.cp_exchange

    def cost_model(self, *, ep_size: int = 1, model_parallel_size: int = 1, between_nodes: bool = False) -> CostModel:
        """The same as integer costs, in attoseconds; `cp_exchange` is 0 where it was not measured.

        Args:
            ep_size: expert-parallel ranks. Above 1 the routed experts' part is kept apart.
            model_parallel_size: tensor- times context-parallel ranks, over which tokens and heads are spread; the
                fixed costs of a micro-batch and of a sequence stay the same on each.
            between_nodes: context-parallel ranks are on several nodes.
        """
        exchange = self.exchange_seconds(between_nodes=between_nodes) or 0.0
        linear = self.linear + (self.expert_linear if ep_size == 1 else 0.0)

        def units(seconds: float) -> int:
            return round(seconds * UNITS_PER_SECOND)

        return CostModel(
            linear=units(linear / model_parallel_size),
            quadratic=units(self.quadratic / model_parallel_size),
            per_sequence=units(self.per_sequence),
            per_microbatch=units(self.per_microbatch),
            expert_linear=units(self.expert_linear / model_parallel_size) if ep_size > 1 else 0,
            windows=tuple((window, units(seconds / model_parallel_size)) for window, seconds in self.windows),
            cp_exchange=units(exchange / model_parallel_size),
        )

    def write(self, path: Path) -> None:
        """Write seconds.json."""
        path.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Calibration:
        """Read seconds.json.

        Raises:
            BalanceError: the file is missing or is not one.
        """
        try:
            content = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise BalanceError(
                f"the calibration {str(path)!r} cannot be read: {error}. Make one with megatron-balance fit."
            ) from error
        if not isinstance(content, dict) or cast("dict[str, Any]", content).get("format") != FORMAT:
            raise BalanceError(
                f"{str(path)!r} does not say {FORMAT!r}: make it again with this version's megatron-balance fit."
            )
        known = {one.name for one in fields(cls)}
        values = {name: value for name, value in cast("dict[str, Any]", content).items() if name in known}
        try:
            values["windows"] = tuple((int(window), seconds) for window, seconds in values.get("windows", ()))
            values["origin"] = dict(values.get("origin", {}))
            if values.get("held_out_error") is not None:
                values["held_out_error"] = float(values["held_out_error"])
            return cls(**values)
        except (ArithmeticError, KeyError, TypeError, ValueError) as error:
            raise BalanceError(f"the calibration {str(path)!r} is damaged: {error}") from error


_COEFFICIENTS = ("per_microbatch", "per_sequence", "linear", "expert_linear", "quadratic")
