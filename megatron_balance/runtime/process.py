"""This process: the device and packages that it computes with, its node, and what it has started.

torchrun numbers the ranks of a node one after another, and sets LOCAL_WORLD_SIZE.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_balance.version import build_version

DeviceKind = Literal["cuda", "cpu"]

PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex")

_device_kind: DeviceKind = "cuda"
_started = contextlib.ExitStack()


def set_device_kind(kind: DeviceKind) -> None:
    """Declare what `cuda` names in this process from now on."""
    global _device_kind
    _device_kind = kind


def device_kind() -> DeviceKind:
    """`cuda` for a GPU, `cpu` where the CPU takes its place (the shim of the tests)."""
    return _device_kind


def environment(device: str) -> dict[str, Any]:
    """`device`, `clock`, `threads` on a CPU, and `versions` of the packages, for the record of a measurement."""
    versions = {"megatron-balance": build_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if device == "cpu":
        hardware = {"device": processor(), "threads": torch.get_num_threads(), "clock": "CPU seconds of the process"}
    else:
        hardware = {"device": torch.cuda.get_device_name(), "clock": "CUDA events"}
    return {**hardware, "versions": versions}


def processor() -> str:
    """The processor's name from Linux, or from Python."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def local_world_size() -> int | None:
    """Ranks of this process's node; None where no launcher has said."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None


def close_on_undo(close: Callable[[], object]) -> None:
    """Have `close_all` call this function, before those that were given earlier."""
    _started.callback(close)


def close_all() -> None:
    """End threads, processes and groups, the latest first. Every rank calls it after the same step."""
    _started.close()
