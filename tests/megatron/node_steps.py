"""record_steps.py on ranks of which torchrun would have put two on each node."""

from __future__ import annotations

import os

import record_steps


def main() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    record_steps.main()
