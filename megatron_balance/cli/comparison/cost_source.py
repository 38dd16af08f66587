"""Resolves the cost model of a comparison, and the seconds per unit of cost, from flags or a recorded run.

    --cost tokens | flops | seconds.json         that cost
    --model                                      its FLOPs
    a recorded run                               the cost that the run planned with
    nothing                                      tokens

If the model is known, the cost includes the exchange between context-parallel ranks: at one size through
`CostModel.at_cp_size`, with dynamic sizes as `cp_exchange`.

Invariant: seconds are shown only if they were measured, or follow from a speed that the user gave.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from megatron_balance.cli.comparison.communication import ASSUMED_LINKS, cp_link, exchange_cost
from megatron_balance.cli.comparison.throughput import (
    CostRate,
    rate_of_calibration,
    rate_of_flops,
    rate_of_run,
    rate_of_tokens,
)
from megatron_balance.cost.calibration import Calibration
from megatron_balance.cost.communication import Link
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.resolve import find_shape, resolve_cost
from megatron_balance.errors import BalanceError
from megatron_balance.model.shape import ModelShape
from megatron_balance.record.judging import imbalance, recosted
from megatron_balance.record.run_record import RunRecord
from megatron_balance.report.time_scale import is_measured, time_scale
from megatron_balance.topology import Topology

DEFAULT_EFFICIENCY = 0.4
"""Default fraction of a GPU's peak: often reached, and shown as an assumption."""


@dataclass(frozen=True, eq=False)
class CostSource:
    """The cost of a sample on any number of ranks.

    Attributes:
        cost: `--cost`, or None.
        model: `--model`, or None.
        record: the recorded run, or None.
        peak_tflops: of one GPU, or None.
        efficiency: fraction of the peak that is reached, or None for the default.
        cp_bandwidth: `--cp-bandwidth`, GB/s, or None for the assumed one.
    """

    cost: str | None
    model: str | None
    record: RunRecord | None = None
    peak_tflops: float | None = None
    efficiency: float | None = None
    cp_bandwidth: float | None = None

    @classmethod
    def from_flags(cls, args: argparse.Namespace, *, record: RunRecord | None) -> CostSource:
        """Read and check the flags.

        Raises:
            BalanceError: a speed is given for a cost other than FLOPs, or a bandwidth without a model.
        """
        source = cls(args.cost, args.model, record, args.peak_tflops, args.efficiency, args.cp_bandwidth)
        if args.cp_bandwidth is not None and args.model is None:
            raise BalanceError(
                "--cp-bandwidth is given without --model, whose keys and values ranks receive: add it, or drop it."
            )
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

    def cost_model(self, topology: Topology, *, free: bool = False) -> CostModel:
        """The cost model that judges plans on these ranks, communication included if it is known.

        Args:
            topology: the ranks.
            free: communication takes no time.

        Raises:
            BalanceError: the model is unknown or missing, or the run's own costs are not valid on these ranks.
        """
        return self._with_communication(self._judging(topology), topology=topology, cost_name=self.cost_name, free=free)

    def _judging(self, topology: Topology) -> CostModel:
        if self.cost is not None or self.model is not None or self.record is None:
            return self._chosen(self.cost, topology)
        if not self.holds_at(topology):
            raise BalanceError(
                "the recorded run's costs hold for its own context-, tensor- and expert-parallel ranks, and others are "
                "asked about: add --model, or --cost seconds.json."
            )
        return self.record.info.cost_model

    def _with_communication(
        self, cost_model: CostModel, *, topology: Topology, cost_name: str, free: bool = False
    ) -> CostModel:
        exchange = self.exchange(topology, cost_name=cost_name)
        if exchange is None:
            return replace(cost_model, cp_exchange=0)
        priced = replace(cost_model, cp_exchange=0 if free else exchange)
        if topology.dynamic_cp:
            return priced
        if self.cost is not None and cost_name == "seconds":
            # Fitted costs are those of one rank already: each receives (c-1)/c of a sample.
            received = priced.cp_exchange * (topology.cp_size - 1) // topology.cp_size
            return replace(priced, linear=priced.linear + received, cp_exchange=0)
        return priced.at_cp_size(topology.cp_size)

    def exchange(self, topology: Topology, *, cost_name: str) -> int | None:
        """`CostModel.cp_exchange` on these ranks in `flops` or `seconds`; None if it is not known."""
        own = self._own_exchange(topology, cost_name=cost_name)
        if own or self.shape is None or cost_name == "tokens":
            return own or None
        return exchange_cost(self.shape, topology=topology, link=self.cp_link(topology), cost_name=cost_name)

    def _own_exchange(self, topology: Topology, *, cost_name: str) -> int:
        """The exchange that the recorded run planned with or the file has; 0 without either."""
        if self.record is not None and self.cost is None and self.model is None:
            return self.record.info.cost_model.cp_exchange
        return self._chosen(self.cost, topology).cp_exchange if self.cost and cost_name == "seconds" else 0

    def cp_link(self, topology: Topology) -> Link:
        """The link that context-parallel ranks receive over."""
        tflops = None
        if self.peak_tflops is not None:
            tflops = self.peak_tflops * (DEFAULT_EFFICIENCY if self.efficiency is None else self.efficiency)
        return cp_link(topology, gigabytes_per_second=self.cp_bandwidth, tflops=tflops)

    @cached_property
    def shape(self) -> ModelShape | None:
        """The model of `--model`."""
        return None if self.model is None else find_shape(self.model)

    def extrapolation(self, longest: int) -> str:
        """A notice where sequences are longer than those that `--cost` was measured on; else empty."""
        if self.cost is None or not self.cost.endswith(".json"):
            return ""
        return Calibration.read(Path(self.cost)).extrapolation(longest)

    def holds_at(self, topology: Topology) -> bool:
        """True if the cost is known on these ranks; a recorded run's own cost holds for its own ranks only."""
        if self.cost is not None or self.model is not None or self.record is None or self.cost_name == "tokens":
            return True
        ran_on = self.record.info.topology
        if topology.ep_size != ran_on.ep_size:
            return False
        return self.cost_name == "flops" or _sharing(topology) == _sharing(ran_on)

    def flops_model(self, topology: Topology) -> CostModel | None:
        """The cost model that `--balance-by-flops` plans with; None where the model is unknown."""
        if self.model is not None:
            return self._planning(self._chosen("flops", topology), topology=topology, cost_name="flops")
        return self._planning_as_judged(topology) if self.cost_name == "flops" else None

    def calibrated_model(self, topology: Topology) -> CostModel | None:
        """The cost model that `--balance-cost` plans with; None without seconds."""
        return self._planning_as_judged(topology) if self.cost_name == "seconds" else None

    def _planning_as_judged(self, topology: Topology) -> CostModel:
        return self._planning(self._judging(topology), topology=topology, cost_name=self.cost_name)

    def _planning(self, cost_model: CostModel, *, topology: Topology, cost_name: str) -> CostModel:
        """Training plans with communication only under dynamic context parallelism."""
        if not topology.dynamic_cp:
            return replace(cost_model, cp_exchange=0)
        return self._with_communication(cost_model, topology=topology, cost_name=cost_name)

    def rate(self, topology: Topology) -> CostRate:
        """Seconds per unit of the cost."""
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
            source += " (for seconds: --peak-tflops, or --cost seconds.json)"
        if self.exchange(topology, cost_name=self.cost_name) and self.shape is not None:
            stated = f"{self.cp_bandwidth:g} GB/s" if self.cp_bandwidth else f"{ASSUMED_LINKS} (--cp-bandwidth)"
            source += f". Context-parallel ranks receive {stated}"
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
        """Measured seconds per unit of the judging cost, on one pipeline stage of the recorded run."""
        if self.measured_imbalance is None or (self.cost_name == "seconds" and self.cost is not None):
            return None
        assert self.record is not None, "measurements are in the record"
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
            model_parallel_size=_sharing(topology),
        )


def _sharing(topology: Topology) -> int:
    """Ranks that share a measured cost; with dynamic sizes the planner divides it by the context-parallel size."""
    return topology.tp_size * (1 if topology.dynamic_cp else topology.cp_size)
