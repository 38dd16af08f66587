"""The cost of a sample in a comparison, and the seconds of a unit of it.

Costs become seconds by a seconds.json, which holds them, or by the rate of `--device`; else only ratios are shown.

If the model is known, the cost includes what context-parallel ranks receive; optimiser, data loading and other
communication are not included.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    tflops: int | None  # of all that is linear, on `--device`
    record: RunRecord | None
    script_options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the training script
    calibration: Calibration | None = None  # that of `--cost`, or what was fitted

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
        return run_costs(
            {"use_megatron_fsdp": topology.fully_sharded, **self.script_options, "balance_cost": name},
            topology=topology,
            shape=self._known_shape,
            calibration=self.calibration if name == "seconds" else None,
            tflops=self.tflops or ASSUMED_TFLOPS,
        )

    def split_advice(self, topology: Topology, lengths: NDArray[np.int64]) -> str:
        """A sentence on another split of the layers; empty where none would pay, or costs are not FLOPs."""
        if self.shape is None or self.name != "flops":
            return ""
        layout = layout_of(self.script_options, topology=topology, shape=self.shape)
        return split_advice(
            layout, shape=self.shape, lengths=lengths, attention_rate=self.on(topology).attention_rate or 1.0
        )

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
        if self.name == "flops" and self.tflops is not None:
            return TimeScale("s", 1 / (self.tflops * 1e12 * topology.gpus_per_rank))
        return TimeScale(self.name, 1 / topology.gpus_per_rank)

    def text(self, topology: Topology) -> str:
        """The cost and its speed as text."""
        names = {"flops": f"FLOPs of {in_a_line(self.model)}" if self.model else "FLOPs", "seconds": "seconds of a run"}
        text = names.get(self.name, self.name)
        if self.name == "flops" and self.tflops is not None:
            text += f" at {self.tflops:g} TFLOPS a GPU"
        elif self.name != "seconds":
            text += ". For seconds add --model and --device, or --cost seconds.json"
        return ". ".join([text, *(line.removesuffix(".") for line in self.on(topology).log_lines)])
