"""The cost of a sample in a comparison, and the seconds of a unit of it.

Costs become seconds by a seconds.json, which holds them, or by the rates of `--device`; else only ratios are shown.

If the model is known, the cost includes what context-parallel ranks receive; optimiser, data loading and other
communication are not included. Sparse attention is counted by the pack, as in training.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_balance.cli.terminal import in_a_line
from megatron_balance.cost.calibration import UNITS_PER_SECOND, Calibration
from megatron_balance.cost.model import CostModel
from megatron_balance.cost.rates import (
    ASSUMED_TFLOPS,
    BETWEEN_NODES,
    GPUS_PER_NODE,
    WITHIN_NODE,
    default_attention_rate,
    find_shape,
    resolve_cost,
    resolve_exchange,
    resolve_gather,
    split_advice,
)
from megatron_balance.errors import BalanceError
from megatron_balance.model.layout import PipelineLayout
from megatron_balance.model.shape import ModelShape
from megatron_balance.record import RunRecord
from megatron_balance.report.figures import TimeScale
from megatron_balance.topology import Topology

_RECEIVED = ("cp_exchange", "cp_all_to_all", "cp_all_gather")
_LAYOUT_OPTIONS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
)


@dataclass(frozen=True, eq=False)
class CompareCosts:
    """The cost of a sample on any number of ranks, by the flags of `compare`."""

    cost: str | None
    model: str | None
    device: str | None
    record: RunRecord | None
    max_tokens_per_gpu: int  # of a full pack
    script_options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the training script
    fitted: Calibration | None = None  # seconds in place of those of a file

    @cached_property
    def rates(self) -> tuple[float, float] | None:
        """TFLOPS of all that is linear and of attention on `--device`."""
        if self.device is None:
            return None
        if self.name != "flops":
            raise BalanceError(
                f"--device is {self.device!r}, but the cost is {self.name}, not FLOPs: add --model, or drop it."
            )
        rates: list[float] = []
        with suppress(ValueError):
            rates = [float(rate) for rate in self.device.split(",")]
        if len(rates) not in (1, 2) or not all(0 < rate < float("inf") for rate in rates):
            raise BalanceError(
                f"--device is {self.device!r}: give TFLOPS above 0, LINEAR or LINEAR,ATTENTION (published ones are in "
                "docs/cost-model.md)."
            )
        return rates[0], rates[-1] if len(rates) > 1 else rates[0] * self.default_rate

    @property
    def attention_rate(self) -> float:
        """The rate of attention over that of all else, to two digits as the training flag would have it."""
        return self.default_rate if self.rates is None else float(f"{self.rates[1] / self.rates[0]:.2g}")

    @property
    def default_rate(self) -> float:
        """The rate that training takes without a flag, in bf16."""
        return default_attention_rate(None if self.shape is None else self.shape.num_experts)

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
        """The seconds.json of `--cost`, or what was fitted."""
        if self.cost is None or not self.cost.endswith(".json"):
            return None
        return self.fitted or Calibration.read(Path(self.cost))

    def extrapolation(self, longest: int) -> str:
        """A notice where sequences are longer than those that were measured; empty where they are not."""
        return "" if self.calibration is None else self.calibration.extrapolation(longest)

    def planning(self, name: str, topology: Topology, *, pack_tokens: int | None = None) -> CostModel:
        """The cost model that training plans with on these ranks, by a name; packs are full up to the cap."""
        if self.record is None or self.cost is not None or self.model is not None:
            cost_model = resolve_cost(
                self.calibration or self.cost if name == "seconds" else name,
                model=self.shape,
                ep_size=topology.ep_size,
                model_parallel_size=topology.model_parallel_size,
                attention_rate=self.attention_rate,
                pack_tokens=self.max_tokens_per_gpu * topology.cp_size if pack_tokens is None else pack_tokens,
                layout=self._layout(topology),
            )
        else:
            cost_model, recorded = self.record.info.cost_model, self.record.info.topology
            if name == "flops":  # a run plans with the fixed costs of all its context-parallel ranks
                fixed = cost_model.per_microbatch // (1 if recorded.dynamic_cp else recorded.cp_size)
                gather = cost_model.gather // (1 if recorded.dynamic_cp else recorded.cp_size)
                cost_model = replace(cost_model, per_microbatch=fixed, gather=gather)
        if name != "tokens":
            cost_model = replace(cost_model, gather=cost_model.gather or self._gather(topology)[0])
        received = dict.fromkeys(_RECEIVED, 0) | (self._exchange(topology) if topology.dynamic_cp else {})
        cost_model = replace(cost_model, **received)
        is_shared = name == "flops" and not topology.dynamic_cp
        return cost_model.summed_over_cp(topology.cp_size) if is_shared else cost_model

    @property
    def _layout_flags(self) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in _LAYOUT_OPTIONS if self.script_options.get(name)]

    def _layout(self, topology: Topology) -> PipelineLayout | None:
        """The split of layers by the script's flags, else as many on every stage; the last has the output layer."""
        shape, stages = self.shape, topology.pp_size
        if shape is None or stages == 1:
            return None
        if not self._layout_flags:
            return PipelineLayout.even_split(shape.num_layers, pp_size=stages, vpp_size=topology.vpp_size)
        options = {"num_virtual_stages_per_pipeline_rank": topology.vpp_size, **self.script_options}
        layout = PipelineLayout.from_options({**options, "pipeline_model_parallel_size": stages}, shape=shape)
        if layout is None or len(layout.num_layers) != stages * topology.vpp_size or _LAYOUT_OPTIONS[-1] in options:
            raise BalanceError(
                f"after --: {', '.join(self._layout_flags)}: compare needs a split of {shape.num_layers} layers into "
                f"{stages} stages of {topology.vpp_size} chunks: correct or drop them."
            )
        return layout

    def split_advice(self, topology: Topology, lengths: NDArray[np.int64]) -> str:
        """A sentence on another split of the layers; empty where none would pay, or costs are not FLOPs."""
        shape, layout = self.shape, self._layout(topology)
        if shape is None or layout is None or self.name != "flops":
            return ""
        advice = split_advice(layout, shape=shape, lengths=lengths, attention_rate=self.attention_rate)
        return advice and f"with {'the' if self._layout_flags else 'an even'} split of layers {advice}"

    def judging(self, topology: Topology, *, pack_tokens: int | None = None) -> CostModel:
        """The cost model that judges plans on these ranks, with what context-parallel ranks receive."""
        cost_model, cp_size = self.planning(self.name, topology, pack_tokens=pack_tokens), topology.cp_size
        if topology.dynamic_cp:
            return cost_model
        summed = replace(cost_model, **self._exchange(topology)).summed_over_cp(cp_size)
        if self.name == "seconds":  # its costs are those of one rank already
            waits = (summed.linear - cost_model.linear) // cp_size
            received = summed.cp_received // cp_size
            return replace(cost_model, linear=cost_model.linear + waits, cp_received=received)
        return replace(summed, per_microbatch=cost_model.per_microbatch, gather=cost_model.gather)

    def _gather(self, topology: Topology) -> tuple[int, str]:
        """`CostModel.gather` on these ranks, and the bandwidth as text; 0 without a model or FSDP."""
        if self.shape is None:
            return 0, ""
        return resolve_gather(
            {"use_megatron_fsdp": topology.fully_sharded, **self.script_options},
            shape=self.shape,
            topology=topology,
            calibration=self.calibration,
            tflops=ASSUMED_TFLOPS if self.rates is None else self.rates[0],
        )

    def _exchange(self, topology: Topology) -> dict[str, int]:
        """What a CostModel counts as received on these ranks; none if it is not known, or the cost is tokens."""
        if self.name == "tokens":
            return {}
        if self.calibration is None and self.record is not None and self.model is None:
            return {name: getattr(self.record.info.cost_model, name) for name in _RECEIVED}
        tflops = ASSUMED_TFLOPS if self.rates is None else self.rates[0]
        exchange, _ = resolve_exchange(
            self.shape,
            bytes_per_second=_link(topology)[0] * 1e9,
            calibration=self.calibration,
            tp_size=topology.tp_size,
            tflops=tflops,
        )
        return exchange

    @property
    def assumes_bandwidth(self) -> bool:
        """No run has measured what context-parallel ranks receive."""
        return self.calibration is None or not self.calibration.costs.cp_exchange

    def knows_exchange(self, topology: Topology) -> bool:
        """What context-parallel ranks would receive is known."""
        return any(self._exchange(topology).values())

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
            text += " at {:g} TFLOPS a GPU, attention at {:g} (r = {:g})".format(*self.rates, self.attention_rate)
        elif self.name == "flops" and self.record is None:
            text += f", attention at {self.attention_rate:g} times the rate of all else, as in training without a flag"
        if self.rates is None and self.name != "seconds":
            model = "" if self.name == "flops" and self.record is None else "--model and "
            text += f". For seconds add {model}--device, or --cost seconds.json"
        if self.shape is not None and self.knows_exchange(topology):
            text += ". Context-parallel ranks receive {:g} GB/s, an assumption for {}".format(*_link(topology))
        if self.name != "tokens" and (link := self._gather(topology)[1]):
            text += f". FSDP gathers weights at {link}"
        return text


def _link(topology: Topology) -> tuple[float, str]:
    """GB/s between context-parallel ranks, and what they are assumed for."""
    if topology.num_gpus <= GPUS_PER_NODE:
        return WITHIN_NODE / 1e9, f"at most {GPUS_PER_NODE} GPUs"
    return BETWEEN_NODES / 1e9, "several nodes"
