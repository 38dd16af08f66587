"""The cost of a sample in a comparison, and the seconds of a unit of it.

    --cost tokens | flops | seconds.json         that cost
    --model                                      its FLOPs
    a record                                     the cost that the run planned with
    nothing                                      tokens

    seconds of a unit of cost
    seconds.json                                 it holds them
    flops and --device                           FLOPs over the rates of the GPUs that share a sample
    a record with measured micro-batches         fitted to them
    else                                         not known: only ratios are shown

If the model is known, the cost includes what context-parallel ranks receive: at one size through
`CostModel.at_cp_size`, with dynamic sizes as `cp_exchange`. Optimiser, data loading and other communication are not
included. Where the time is not a makespan, all pipeline stages work at the same time, so the work is divided by them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import (
    ASSUMED_TFLOPS,
    BETWEEN_NODES,
    WITHIN_NODE,
    default_attention_rate,
    exchange_flops_per_token,
    find_profile,
    find_shape,
    resolve_cost,
)
from megatron_balance.errors import BalanceError
from megatron_balance.mcore.options import dynamic_cp_problem
from megatron_balance.mcore.setup.flags import ALL_RANKS
from megatron_balance.model.shape import ModelShape
from megatron_balance.record import RunRecord
from megatron_balance.report.figures import TimeScale, time_scale
from megatron_balance.topology import Topology

GPUS_PER_NODE = 8
"""Runs on at most this many GPUs are assumed to be on one node."""


@dataclass(frozen=True, eq=False)
class Costs:
    """The cost of a sample on any number of ranks.

    Attributes:
        cost: `--cost`, or None.
        model: `--model`, or None.
        record: the recorded run, or None.
        device: `--device`, a profile's name or TFLOPS that one GPU reaches in training, or None.
        attention_factor: on the rate of attention, to see what depends on it.
    """

    cost: str | None
    model: str | None
    record: RunRecord | None = None
    device: str | None = None
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.rates is not None and self.name != "flops":
            raise BalanceError(
                f"--device is given and the cost is {self.name}, not FLOPs: add --model, or drop --device."
            )

    @cached_property
    def rates(self) -> tuple[float, float, str] | None:
        """TFLOPS of all that is linear and of attention on `--device`, and their source."""
        if self.device is None:
            return None
        try:
            rates = [float(rate) for rate in self.device.split(",")]
        except ValueError:
            profile = find_profile(self.device)
            return profile.linear_tflops, profile.attention_tflops, f"{self.device}: {profile.source}"
        if len(rates) > 2 or not all(0 < rate < float("inf") for rate in rates):
            raise BalanceError(
                f"--device is {self.device!r}: give the TFLOPS that one GPU reaches, LINEAR or LINEAR,ATTENTION, above "
                "0, or the name of a profile."
            )
        return rates[0], rates[-1], "--device"

    @property
    def attention_rate(self) -> float:
        """The rate of attention over that of all else, to two digits as the training flag would have it."""
        return self.default_rate if self.rates is None else float(f"{self.rates[1] / self.rates[0]:.2g}")

    @property
    def default_rate(self) -> float:
        """The rate that training takes without a flag, in bf16."""
        return default_attention_rate(has_experts=self.shape is not None and self.shape.num_experts > 0, fp8=False)

    @property
    def name(self) -> str:
        """`tokens`, `flops` or `seconds`."""
        if self.cost is not None:
            return self.cost if self.cost in ("tokens", "flops") else "seconds"
        if self.model is not None:
            return "flops"
        return "tokens" if self.record is None else self.record.info.cost_name

    @cached_property
    def shape(self) -> ModelShape | None:
        """The model of `--model`."""
        return None if self.model is None else find_shape(self.model)

    @cached_property
    def calibration(self) -> Calibration | None:
        """The seconds.json of `--cost`."""
        return Calibration.read(Path(self.cost)) if self.cost is not None and self.cost.endswith(".json") else None

    def judging(self, topology: Topology) -> CostModel:
        """The cost model that judges every plan on these ranks, with what context-parallel ranks receive."""
        cost_model, exchange = self._of_samples(topology), self.exchange(topology)
        if topology.dynamic_cp or not exchange:
            return replace(cost_model, cp_exchange=exchange)
        if self.calibration is not None:  # its costs are those of one rank already: each receives (c-1)/c of a sample
            received = exchange * (topology.cp_size - 1) // topology.cp_size
            return replace(cost_model, cp_received=received, cp_exchange=0)
        return replace(cost_model, cp_exchange=exchange).at_cp_size(topology.cp_size)

    def planning(self, topology: Topology) -> CostModel:
        """The cost model that training plans with: with communication only under dynamic context parallelism."""
        return self.judging(topology) if topology.dynamic_cp else replace(self._of_samples(topology), cp_exchange=0)

    def flops(self, topology: Topology) -> CostModel | None:
        """The cost model that `--balance-by-flops` plans with at one size; None where the model is unknown."""
        if self.name == "flops":
            return self.planning(topology)
        if self.shape is None:
            return None
        return resolve_cost("flops", model=self.shape, ep_size=topology.ep_size, attention_rate=self.attention_rate)

    def _of_samples(self, topology: Topology) -> CostModel:
        if self.record is None or self.cost is not None or self.model is not None:
            return resolve_cost(
                self.cost,
                model=self.shape,
                ep_size=topology.ep_size,
                model_parallel_size=ranks_of_sample(topology),
                attention_rate=self.attention_rate * self.attention_factor,
            )
        info = self.record.info
        same_ranks = self.name == "flops" or ranks_of_sample(topology) == ranks_of_sample(info.topology)
        if self.name == "tokens" or (same_ranks and topology.ep_size == info.topology.ep_size):
            return info.cost_model
        raise BalanceError(
            "the recorded run's costs hold for its own context-, tensor- and expert-parallel ranks, and others are "
            "asked about: add --model, or --cost seconds.json."
        )

    def exchange(self, topology: Topology) -> int:
        """`CostModel.cp_exchange` on these ranks; 0 if it is not known, or the cost is tokens."""
        known, tflops = 0, ASSUMED_TFLOPS if self.rates is None else self.rates[0]
        if self.calibration is not None:  # FLOPs at the second rate are attoseconds
            known = self.calibration.cost_model(model_parallel_size=topology.tp_size).cp_exchange
            tflops = UNITS_PER_SECOND / 1e12 / topology.tp_size
        elif self.record is not None and self.model is None:
            known = self._of_samples(topology).cp_exchange
        if self.name == "tokens" or known or self.shape is None:
            return known
        try:
            return exchange_flops_per_token(self.shape, bytes_per_second=_link(topology)[0], tflops=tflops)
        except BalanceError:  # it has layers that pass no keys and values around a ring
            return 0

    def why_not_dynamic(self, topology: Topology) -> str | None:
        """The reason why training refuses `--balance-context-parallel` with this model, or None.

        The fields of a shape have the names of Megatron's options, so the table of options used in training decides.
        """
        fields = {} if self.shape is None else vars(self.shape)
        options = fields | {"balance_context_parallel": ALL_RANKS, "use_megatron_fsdp": topology.fully_sharded}
        problem = dynamic_cp_problem(options)
        if problem is None and not self.exchange(topology):
            return "what context-parallel ranks would receive is not known: add --model"
        return problem

    @property
    def in_seconds(self) -> bool:
        """Times are in seconds, not in an arbitrary unit."""
        return self.name == "seconds" or self.rates is not None or self._seconds_of_run is not None

    def scale(self, topology: Topology) -> TimeScale:
        """From the cost that judges on these ranks to time on one pipeline stage."""
        per_cost = 1 / ranks_of_sample(topology)
        if self.rates is not None:
            per_cost /= self.rates[0] * 1e12
        elif self._seconds_of_run is not None:
            per_cost *= self._seconds_of_run
        elif self.name == "seconds":
            per_cost = 1 / UNITS_PER_SECOND
        return TimeScale("s" if self.in_seconds else self.name, per_cost / topology.pp_size)

    @cached_property
    def _seconds_of_run(self) -> float | None:
        """Of a unit of the judging cost, on all GPUs that shared a sample in the recorded run; None where unknown."""
        if self.record is None or self.calibration is not None:
            return None
        info = self.record.info
        cost_model = self.judging(info.topology)
        info = replace(info, cost_model=cost_model, cost_name=self.name)
        scale = time_scale(RunRecord(info, tuple(replace(step, cost_model=cost_model) for step in self.record.steps)))
        return scale.per_cost * info.topology.pp_size * ranks_of_sample(info.topology) if scale.fitted else None

    def text(self, topology: Topology) -> str:
        """The cost and its speed as text."""
        said = {"flops": "FLOPs", "seconds": "seconds of a run"}.get(self.name, self.name)
        if self.model is not None and self.name == "flops":
            said = f"FLOPs of {self.model}"
        if self.rates is not None:
            linear, attention, source = self.rates
            said += f" at {linear:g} TFLOPS a GPU, attention at {attention:g} (r = {self.attention_rate:g}; {source})"
        elif self._seconds_of_run is not None:
            said = "seconds that the run's micro-batches took"
        elif not self.in_seconds:
            said += " (for seconds: --device, or --cost seconds.json)"
        if self.name == "flops" and self.rates is None and self.record is None:
            said += f", attention at {self.attention_rate:g} times the rate of all else, as in training without a flag"
        if self.shape is not None and self.exchange(topology):
            bytes_per_second, where = _link(topology)
            said += f". Context-parallel ranks receive {bytes_per_second / 1e9:g} GB/s, an assumption for {where}"
        return said


def num_gpus(topology: Topology) -> int:
    """GPUs of the run. Experts are spread over those that are there already."""
    return topology.num_leaves * topology.pp_size * topology.tp_size


def ranks_of_sample(topology: Topology) -> int:
    """GPUs that do the work a cost counts, on one pipeline stage: with dynamic context-parallel sizes a leaf's."""
    return topology.tp_size * (1 if topology.dynamic_cp else topology.cp_size)


def _link(topology: Topology) -> tuple[float, str]:
    """Bytes a second between context-parallel ranks, and what they are assumed for."""
    if num_gpus(topology) <= GPUS_PER_NODE:
        return WITHIN_NODE, f"at most {GPUS_PER_NODE} GPUs"
    return BETWEEN_NODES, "several nodes"
