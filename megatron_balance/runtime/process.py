"""This process: the device and packages that it computes with, and what it has started."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import resource
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_balance.errors import BalanceError
from megatron_balance.version import build_version

DeviceKind = Literal["cuda", "cpu"]

PACKAGES = ("torch", "megatron-core", "transformer-engine", "apex")

SPARE_FILES = 64
"""Beside sockets: of loaders, checkpoints and logs that open later."""

_device_kind: DeviceKind = "cuda"
_started = contextlib.ExitStack()


def set_device_kind(kind: DeviceKind) -> None:
    """Declare what `cuda` names in this process from now on."""
    global _device_kind
    _device_kind = kind


def device_kind() -> DeviceKind:
    """`cuda` for a GPU, `cpu` where the CPU takes its place (the shim of the tests)."""
    return _device_kind


def device_nbytes() -> int:
    """Memory of this rank's device in bytes; 0 where it has none."""
    return torch.cuda.get_device_properties("cuda").total_memory if torch.cuda.is_available() else 0


def environment(device: str) -> dict[str, Any]:
    """`device`, `clock`, `threads` on a CPU, and `versions` of the packages, for the record of a measurement."""
    versions = {"megatron-balance": build_version()}
    versions |= {package: version for package in PACKAGES if (version := version_of(package)) is not None}
    if device == "cpu":
        hardware = {"device": processor(), "threads": torch.get_num_threads(), "clock": "CPU seconds of the process"}
    else:
        hardware = {"device": torch.cuda.get_device_name(), "clock": "CUDA events"}
    return {**hardware, "versions": versions}


def version_of(package: str) -> str | None:
    """The version of a package, without the commit after its `+`; None where it has none.

    Of Megatron Core that of the imported module: a checkout has no metadata, or those of another release.
    """
    with contextlib.suppress(ImportError, AttributeError):  # the first is of missing metadata too
        if package == "megatron-core":
            version: str = importlib.import_module("megatron.core.package_info").__version__
        else:
            version = metadata.version(package)
        return version.partition("+")[0]
    return None


def processor() -> str:
    """The processor's name from Linux, or from Python."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def files_needed(num_sockets: int) -> int:
    """Files that this process has open with so many sockets more; BalanceError where its hard limit is lower."""
    num_open = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    needed, (_, hard) = num_open + num_sockets + SPARE_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BalanceError(
            f"this process may open {hard} files, and the sockets of this run need {needed}: start it under "
            f"ulimit -n {needed} or more (docs/scale.md)."
        )
    return needed


def allow_open_files(num_sockets: int) -> None:
    """Raise the soft limit of open files to what `files_needed` says."""
    needed, (soft, hard) = files_needed(num_sockets), resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def close_on_undo(close: Callable[[], object]) -> None:
    """Have `close_all` call this function, before those that were given earlier."""
    _started.callback(close)


def close_all() -> None:
    """End threads, processes and groups, the latest first. Every rank calls it after the same step."""
    _started.close()
