"""The kind of device that `cuda` names in this process: a GPU, or the CPU in its place (`devkit/cpu.py`)."""

from __future__ import annotations

from typing import Literal

DeviceKind = Literal["cuda", "cpu"]

_kind: DeviceKind = "cuda"


def set_device_kind(kind: DeviceKind) -> None:
    """Declare what `cuda` names from now on."""
    global _kind
    _kind = kind


def device_kind() -> DeviceKind:
    """`cuda` for a GPU, `cpu` where the CPU takes its place."""
    return _kind
