"""The cost of a sample in a comparison, and the seconds of a unit of it.

Costs become seconds by a seconds.json, which holds them, or by the rates of `--device`; else only ratios are shown.

If the model is known, the cost includes what context-parallel ranks receive; optimiser, data loading and other
communication are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.terminal import in_a_line
from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.rates import (
    ASSUMED_TFLOPS,
    RunCosts,
    default_attention_rate,
    find_shape,
    layout_of,
    run_costs,
    split_advice,
)
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape
from megatron_balance.record import RunRecord
from megatron_balance.report.figures import TimeScale
from megatron_balance.topology import Topology


@dataclass(frozen=True, eq=False)
class CompareCosts:
    """The cost of a sample on any number of ranks, by the flags of `compare`."""

    cost: str | None
    model: str | None
    device: str | None
    record: RunRecord | None
    script_options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the training script
    calibration: Calibration | None = None  # that of `--cost`, or what was fitted

    @cached_property
    def rates(self) -> tuple[float, float] | None:
        """TFLOPS of all that is linear and of attention on `--device`."""
        if self.device is None:
            return None
        rates: list[float] = []
        with suppress(ValueError):
            rates = [float(rate) for rate in self.device.split(",")]
        if self.name != "flops" or len(rates) not in (1, 2) or not all(0 < rate < float("inf") for rate in rates):
            raise BalanceError(
                f"--device is {self.device!r}, the cost {self.name}: give TFLOPS above 0, LINEAR or LINEAR,ATTENTION "
                "(published ones are in docs/cost-model.md), and FLOPs as the cost (--model)."
            )
        return rates[0], rates[-1] if len(rates) > 1 else rates[0] * self.default_rate

    @property
    def attention_rate(self) -> float:
        """The rate of attention over that of all else, to two digits as the training flag would have it."""
        return self.default_rate if self.rates is None else float(f"{self.rates[1] / self.rates[0]:.2g}")

    @property
    def default_rate(self) -> float:
        """The rate that training takes without a flag, in bf16."""
        return default_attention_rate(0 if self.shape is None else self.shape.num_experts)

    @property
    def name(self) -> str:
        """`tokens`, `flops` or `seconds`."""
        if self.calibration is not None:
            return "seconds"
        recorded = "tokens" if self.record is None else self.record.info.cost_name
        return self.cost or (recorded if self.model is None else "flops")

    @cached_property
    def shape(self) -> ModelShape | None:
        """The model of `--model`."""
        return None if self.model is None else find_shape(self.model)

    def _known_shape(self) -> ModelShape:
        if self.shape is None:
            raise BalanceError("the cost is flops, but the model is missing: add --model.")
        return self.shape

    def on(self, topology: Topology, *, name: str = "") -> RunCosts:
        """The costs of training on these ranks, by the name that judges or another."""
        name, record = name or self.name, self.record
        if record is not None and self.cost is None and self.model is None and self.calibration is None:
            costs = record.info.cost_model
            if record.info.topology.dynamic_cp and not topology.dynamic_cp and name != "tokens":
                adapted = costs.of_rank if name == "seconds" else costs.summed_over_cp
                costs = adapted(cp_size=topology.cp_size)
            return RunCosts(costs, name)
        options = {
            "use_megatron_fsdp": topology.fully_sharded,
            **self.script_options,
            "balance_cost": name,
            "balance_attention_rate": None if self.rates is None else self.attention_rate,
        }
        return run_costs(
            options,
            topology=topology,
            shape=self._known_shape,
            calibration=self.calibration if name == "seconds" else None,
            tflops=ASSUMED_TFLOPS if self.rates is None else self.rates[0],
        )

    def split_advice(self, topology: Topology, lengths: NDArray[np.int64]) -> str:
        """A sentence on another split of the layers; empty where none would pay, or costs are not FLOPs."""
        if self.shape is None or self.name != "flops":
            return ""
        layout = layout_of(self.script_options, topology=topology, shape=self.shape)
        return split_advice(layout, shape=self.shape, lengths=lengths, attention_rate=self.attention_rate)

    @property
    def assumes_bandwidth(self) -> bool:
        """No run has measured what context-parallel ranks receive."""
        return self.calibration is None or not self.calibration.costs.cp_exchange

    def knows_exchange(self, topology: Topology) -> bool:
        """What context-parallel ranks would receive is known."""
        costs = self.on(topology).model
        return any((costs.cp_exchange, costs.cp_all_to_all, costs.cp_all_gather))

    def scale(self, topology: Topology) -> TimeScale:
        """From the cost that judges on these ranks to time on one pipeline stage."""
        if self.name == "seconds":  # of each rank
            return TimeScale("s", 1 / (UNITS_PER_SECOND * topology.pp_size))
        flops = self.rates[0] * 1e12 if self.rates is not None else 1.0
        return TimeScale("s" if self.rates is not None else self.name, 1 / (flops * topology.gpus_per_rank))

    def text(self, topology: Topology) -> str:
        """The cost and its speed as text."""
        names = {"flops": f"FLOPs of {in_a_line(self.model)}" if self.model else "FLOPs", "seconds": "seconds of a run"}
        text = names.get(self.name, self.name)
        if self.rates is not None:
            text += f" at {self.rates[0]:g} TFLOPS a GPU"
        elif self.name != "seconds":
            text += ". For seconds add --model and --device, or --cost seconds.json"
        return ". ".join([text, *(line.removesuffix(".") for line in self.on(topology).log_lines)])
