"""Resolves the cost that judges a comparison, and the seconds of a unit of it, from flags or a recorded run.

    --cost tokens | flops | calibration.json     that cost
    --model                                      its FLOPs
    a recorded run                               the cost that the run planned with
    nothing                                      tokens

Invariant: seconds are shown only where they were measured, or follow from a speed that the user stated.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.planner.throughput import (
    CostRate,
    rate_of_calibration,
    rate_of_flops,
    rate_of_run,
    rate_of_tokens,
)
from megatron_balance.record.judging import imbalance, recosted
from megatron_balance.record.run_record import RunRecord
from megatron_balance.report.time_scale import is_measured, time_scale
from megatron_balance.topology import Topology

DEFAULT_EFFICIENCY = 0.4
"""Fraction of a GPU's peak where none is given: often reached, and shown as an assumption."""


@dataclass(frozen=True, eq=False)
class CostSource:
    """The cost of a sample on any number of ranks.

    Attributes:
        cost: `--cost`, or None.
        model: `--model`, or None.
        record: the recorded run, or None.
        peak_tflops: of one GPU, or None.
        efficiency: fraction of it that is reached, or None for the default.
    """

    cost: str | None
    model: str | None
    record: RunRecord | None = None
    peak_tflops: float | None = None
    efficiency: float | None = None

    @classmethod
    def from_flags(cls, args: argparse.Namespace, *, record: RunRecord | None) -> CostSource:
        """Read and check the flags.

        Raises:
            BalanceError: a speed is stated for a cost that is no FLOPs.
        """
        source = cls(args.cost, args.model, record, args.peak_tflops, args.efficiency)
        if args.efficiency is not None and args.peak_tflops is None:
            raise BalanceError("--efficiency is a part of --peak-tflops, which is missing: give both or neither.")
        if args.peak_tflops is not None and source.cost_name != "flops":
            raise BalanceError(
                f"--peak-tflops is given and the cost is {source.cost_name}, not FLOPs: add --model, or drop it."
            )
        return source

    @property
    def cost_name(self) -> str:
        """`tokens`, `flops` or `seconds`."""
        if self.cost is not None:
            return self.cost if self.cost in ("tokens", "flops") else "seconds"
        if self.model is not None:
            return "flops"
        return "tokens" if self.record is None else self.record.info.cost_name

    def cost_model(self, topology: Topology) -> CostModel:
        """The cost model that judges on these ranks.

        Raises:
            BalanceError: the model is unknown or missing, or the run's own costs are not valid on these ranks.
        """
        if self.cost is not None or self.model is not None or self.record is None:
            return self._chosen(self.cost, topology)
        if not self.holds_at(topology):
            raise BalanceError(
                "the recorded run's costs hold for its own context-, tensor- and expert-parallel ranks, and others are "
                "asked about: add --model, or --cost calibration.json."
            )
        return self.record.info.cost_model

    def holds_at(self, topology: Topology) -> bool:
        """Whether the cost is known on these ranks; a recorded run's own is known only on its own."""
        if self.cost is not None or self.model is not None or self.record is None or self.cost_name == "tokens":
            return True
        ran_on = self.record.info.topology
        if topology.ep_size != ran_on.ep_size:
            return False
        same_sharing = topology.tp_size * topology.cp_size == ran_on.tp_size * ran_on.cp_size
        return self.cost_name == "flops" or same_sharing

    def flops_model(self, topology: Topology) -> CostModel | None:
        """The cost model of `--balance-by-flops`; None where the model is unknown."""
        if self.model is not None:
            return self._chosen("flops", topology)
        return self.cost_model(topology) if self.cost_name == "flops" else None

    def calibrated_model(self, topology: Topology) -> CostModel | None:
        """The cost model of `--balance-calibration`; None without a calibration."""
        return self.cost_model(topology) if self.cost_name == "seconds" else None

    def rate(self, topology: Topology) -> CostRate:
        """Seconds of a unit of the cost."""
        if self.cost_name == "seconds" and self._seconds_of_run is None:
            return rate_of_calibration()
        if self._seconds_of_run is not None and self.peak_tflops is None:
            assert self.record is not None, "seconds of a run come from its record"
            return rate_of_run(self._seconds_of_run, ran_on=self.record.info.topology, topology=topology)
        if self.cost_name == "flops":
            efficiency = DEFAULT_EFFICIENCY if self.efficiency is None else self.efficiency
            return rate_of_flops(topology, peak_tflops=self.peak_tflops, efficiency=efficiency)
        return rate_of_tokens(topology)

    def text(self, topology: Topology) -> str:
        """The cost and its speed as text."""
        source = self.rate(topology).source
        if self.model is not None and self.cost_name == "flops":
            source = source.replace("FLOPs", f"FLOPs of {self.model}", 1)
        if self.peak_tflops is not None and self.efficiency is None:
            source += ", an assumption (--efficiency)"
        if not self.rate(topology).is_absolute:
            source += " (for seconds: --peak-tflops, or --cost calibration.json)"
        return source

    @cached_property
    def measured_imbalance(self) -> float | None:
        """Slowest over mean of the recorded run's measured seconds, mean of steps; None where nothing was measured."""
        if self.record is None:
            return None
        info = self.record.info
        steps = [imbalance(step.seconds, info=info) for step in self.record.steps if is_measured(step)]
        return float(np.mean(steps)) if steps else None

    @cached_property
    def _seconds_of_run(self) -> float | None:
        """Measured seconds of a unit of the judging cost, on one pipeline stage of the recorded run."""
        if self.measured_imbalance is None or (self.cost_name == "seconds" and self.cost is not None):
            return None
        assert self.record is not None, "what was measured is in the record"
        cost_model = self.cost_model(self.record.info.topology)
        info = replace(self.record.info, cost_model=cost_model, cost_name=self.cost_name)
        steps = tuple(recosted(step, cost_model=cost_model, info=info) for step in self.record.steps)
        scale = time_scale(RunRecord(info, steps))
        return scale.per_cost if scale.unit == "s" else None

    def _chosen(self, cost: str | None, topology: Topology) -> CostModel:
        return resolve_cost(
            cost,
            model=self.model,
            ep_size=topology.ep_size,
            model_parallel_size=topology.tp_size * topology.cp_size,
        )
