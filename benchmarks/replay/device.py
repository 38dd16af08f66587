"""The device that replays: its calibration of a model, and the model itself on it.

torch and Megatron are imported where they are needed: on a CPU, after the shim that lets Megatron run there.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.replay.steps import Timer
from megatron_balance import ModelShape
from megatron_balance.cost.calibration import Calibration

PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-3")
"""Their versions are part of the results."""


@dataclass(frozen=True)
class ReplayDevice:
    """A GPU, or the CPU.

    Attributes:
        kind: `cuda` or `cpu`, as torch names it.
        name: of the hardware.
        dtype: of weights and activations: bfloat16 on a GPU, float32 on a CPU.
    """

    kind: str
    name: str
    dtype: str

    @classmethod
    def find(cls, kind: str | None = None) -> ReplayDevice:
        """The device asked for; by default the GPU where there is one.

        Raises:
            ValueError: a GPU is asked for and there is none.
        """
        import torch

        kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
        if kind == "cpu":
            from megatron_balance.devkit.cpu import enable_cpu, patch_megatron
            from megatron_balance.runtime.environment import processor

            enable_cpu()
            patch_megatron()
            torch.set_num_threads(1)  # as torchrun gives a rank; more would count CPU seconds of waiting
            return cls(kind, processor(), "float32")
        if not torch.cuda.is_available():
            raise ValueError(f"--device is {kind}: torch sees no GPU here; --device cpu --toy runs anywhere")
        return cls(kind, torch.cuda.get_device_name(), "bfloat16")

    @property
    def slug(self) -> str:
        """For file names: `cpu`, or the GPU's name in lower case."""
        return "cpu" if self.kind == "cpu" else re.sub(r"[^a-z0-9]+", "_", self.name.lower()).strip("_")

    def calibrate(self, shape: ModelShape, *, max_tokens: int, repeats: int, seed: int) -> Calibration:
        """Measures the seconds of a model, all of its layers."""
        import torch

        from megatron_balance.mcore.calibration.calibrate import calibrate

        return calibrate(
            shape,
            max_tokens=max_tokens,
            device=self.kind,
            dtype=getattr(torch, self.dtype),
            num_layers=min(shape.num_layers, 2),
            repeats=repeats,
            seed=seed,
        )

    @contextlib.contextmanager
    def running(self, shape: ModelShape, *, seed: int) -> Iterator[Timer]:
        """The whole model on the device, while the context lasts."""
        import torch

        from megatron_balance.mcore.calibration.timed_model import TimedModel, process_groups

        with process_groups(device=self.kind, seed=seed + 1):
            yield TimedModel(shape, device=self.kind, dtype=getattr(torch, self.dtype))
