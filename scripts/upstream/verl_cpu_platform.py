"""A CPU platform for verl, by verl's own way in for other hardware: for tests on machines without a GPU.

VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu_platform PYTHONPATH=scripts/upstream python ...
"""

from types import ModuleType

import numpy as np
import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """A platform without a GPU, as far as single-controller, trainer and micro-batching code needs one."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return torch.cpu

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def communication_backend_name(self) -> str:
        return "gloo"


if not hasattr(torch.cpu, "set_device"):
    # verl's own tests call it on the device module.
    torch.cpu.set_device = lambda device_index: None  # pyright: ignore[reportAttributeAccessIssue]

# verl's tests draw lengths from numpy's generator and seed only torch's.
np.random.seed(0)  # noqa: NPY002
