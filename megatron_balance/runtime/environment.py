"""The device that this process computes on, and the packages that a measurement is made with."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

DeviceKind = Literal["cuda", "cpu"]

PACKAGES = ("megatron-balance", "torch", "megatron-core", "transformer-engine", "apex")

_device_kind: DeviceKind = "cuda"


def set_device_kind(kind: DeviceKind) -> None:
    """Declare what `cuda` names in this process from now on."""
    global _device_kind
    _device_kind = kind


def device_kind() -> DeviceKind:
    """`cuda` for a GPU, `cpu` where the CPU takes its place (the shim of the tests)."""
    return _device_kind


def environment(device: str) -> dict[str, Any]:
    """The hardware and the packages, for the record of a measurement.

    Args:
        device: `cuda` or `cpu`.

    Returns:
        dict: `device`, `clock`, `threads` on a CPU, and `versions` of the packages that are installed.
    """
    versions = {name: _version(name) for name in PACKAGES}
    if device == "cpu":
        hardware = {"device": processor(), "threads": torch.get_num_threads(), "clock": "CPU seconds of the process"}
    else:
        hardware = {"device": torch.cuda.get_device_name(), "clock": "CUDA events"}
    return {**hardware, "versions": {name: version for name, version in versions.items() if version}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The processor's name from Linux, or from Python."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
