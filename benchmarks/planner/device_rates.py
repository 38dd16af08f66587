"""Devices as rates: seconds of a FLOP in GEMMs and in the attention core, and fixed times.

    seconds = gemm * (GEMM FLOPs) + attention * (attention FLOPs)
            + num_layers * (per_microbatch_layer + per_sequence_layer * sequences)

A calibration holds the seconds of one model. Divided by that model's FLOPs it says what the device does with
any model, so one measured file judges the plans of every setup here. A device that was never measured can be
written down in the same way: the family `ASSUMED_DEVICES` differs in nothing but how well it runs attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from megatron_balance import CostModel, ModelShape
from megatron_balance.cost.calibration import Calibration


@dataclass(frozen=True)
class DeviceRates:
    """Times of a device, forward and backward.

    Attributes:
        name: short name, in the results.
        gemm: seconds per FLOP of everything linear in the length.
        attention: seconds per FLOP of the attention core.
        per_microbatch_layer: seconds of a layer in a micro-batch, whatever it holds.
        per_sequence_layer: seconds of a layer for each sequence in it.
        measured: whether the rates come from a measured calibration.
    """

    name: str
    _: KW_ONLY
    gemm: float
    attention: float
    per_microbatch_layer: float = 0.0
    per_sequence_layer: float = 0.0
    measured: bool = False

    def calibration(self, shape: ModelShape) -> Calibration:
        """Seconds of a model on this device, as if they had been measured."""
        # With an expert-parallel group of two the routed experts' part is kept apart.
        flops = CostModel.from_shape(shape, ep_size=2)
        return Calibration(
            per_microbatch=self.per_microbatch_layer * shape.num_layers,
            per_sequence=self.per_sequence_layer * shape.num_layers,
            linear=self.gemm * flops.linear,
            expert_linear=self.gemm * flops.expert_linear,
            quadratic=self.attention * flops.quadratic,
            windows=tuple((window, self.attention * coefficient) for window, coefficient in flops.windows),
        )

    @classmethod
    def from_calibration(
        cls, calibration: Calibration, *, shape: ModelShape, name: str, recompute: bool = False
    ) -> DeviceRates:
        """The rates at which a calibration's device ran its model.

        Layers that are linear in the length (a gated delta net, a window of a long sequence) count as GEMMs.

        Raises:
            ValueError: the model has no attention, so the device's rate at it is unknown.
        """
        flops = CostModel.from_shape(shape, recompute=recompute)
        core = flops.quadratic + sum(coefficient for _, coefficient in flops.windows)
        if core == 0:
            raise ValueError(f"{name}: its model has no attention, so its rate there is not known; measure another")
        core_seconds = calibration.quadratic + sum(seconds for _, seconds in calibration.windows)
        return cls(
            name,
            gemm=(calibration.linear + calibration.expert_linear) / flops.linear,
            attention=core_seconds / core,
            per_microbatch_layer=calibration.per_microbatch / shape.num_layers,
            per_sequence_layer=calibration.per_sequence / shape.num_layers,
            measured=True,
        )


_PEAK = 1 / 400e12
"""Seconds per FLOP of GEMMs: 400 TFLOP/s, what a large bf16 GEMM reaches on a current accelerator."""


def _assumed(speed: str, *, times_gemm: float) -> DeviceRates:
    """A device whose attention core takes `times_gemm` as long per FLOP as a GEMM.

    Fixed times: about 60 kernels of 5 microseconds a layer, forward and backward; one for every sequence.
    """
    return DeviceRates(
        f"attention at {speed}",
        gemm=_PEAK,
        attention=times_gemm * _PEAK,
        per_microbatch_layer=0.3e-3,
        per_sequence_layer=5e-6,
    )


ASSUMED_DEVICES = (
    _assumed("twice GEMM speed", times_gemm=1 / 2),
    _assumed("GEMM speed", times_gemm=1),
    _assumed("half GEMM speed", times_gemm=2),
    _assumed("a third of GEMM speed", times_gemm=3),
)
"""The ratio of linear to quadratic seconds is that of FLOPs, times 2, 1, 1/2 and 1/3. Nothing here is measured."""


def measured_devices(folder: Path) -> Sequence[DeviceRates]:
    """The devices of every `calibration_*.json` in a folder, by name.

    Raises:
        ValueError: a file does not say which model was measured.
    """
    return [_measured_device(file) for file in sorted(folder.glob("calibration_*.json"))]


def _measured_device(file: Path) -> DeviceRates:
    calibration = Calibration.read(file)
    return DeviceRates.from_calibration(
        calibration,
        shape=_shape_of(calibration, file=file),
        name=file.stem,
        recompute=bool(calibration.origin.get("recompute")),
    )


def _shape_of(calibration: Calibration, *, file: Path) -> ModelShape:
    """The model that was measured, which the file's origin holds."""
    fields = calibration.origin.get("shape")
    if not isinstance(fields, dict):
        raise ValueError(f"{file} does not say which model was measured: make it with megatron-balance calibrate")
    # JSON has lists where a shape has tuples.
    sizes: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return ModelShape(**sizes)
