"""A CPU platform for verl, by verl's own way in for other hardware: for tests on machines without a GPU.

VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu_platform PYTHONPATH=.ci/upstream python ...
"""

import numpy as np
import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

ANSWERS = {
    "is_available": True,
    "is_platform_available": True,
    "current_device": 0,
    "device_count": 1,
    "set_device": None,
    "synchronize": None,
    "empty_cache": None,
    "communication_backend_name": "gloo",
}


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """A platform without a GPU, as far as single-controller, trainer and micro-batching code needs one."""

    device_name = property(lambda self: "cpu")
    device_module = property(lambda self: torch.cpu)


for name, answer in ANSWERS.items():
    setattr(PlatformCPU, name, lambda self, *_, _is=answer, **__: _is)

if not hasattr(torch.cpu, "set_device"):
    # verl's own tests call it on the device module.
    torch.cpu.set_device = lambda device_index: None  # pyright: ignore[reportAttributeAccessIssue]

# verl's tests draw lengths from numpy's generator and seed only torch's.
np.random.seed(0)  # noqa: NPY002
