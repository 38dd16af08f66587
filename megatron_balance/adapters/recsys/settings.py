"""The adapter's settings, and upstream's switch in the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Settings:
    """The adapter has no options.

    Attributes:
        name: under which the shuffler is registered in upstream's BatchShufflerFactory.
    """

    name: str = "megatron_balance"


def prefers_all_to_all() -> bool:
    """True if `SHUFFLE_WITH_ALL2ALL` is 1: upstream reads it on every shuffle."""
    return os.environ.get("SHUFFLE_WITH_ALL2ALL", "0") == "1"
