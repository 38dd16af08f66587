"""A TensorBoard of our own, which writes its scalars to TENSORBOARD_DIR/rankN.jsonl.

TensorBoard itself is no package of the tests. Megatron makes the writer, on the rank and with the arguments it chooses.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any


class SummaryWriter:
    def __init__(self, *, log_dir: str, max_queue: int) -> None:
        Path(log_dir).mkdir(parents=True, exist_ok=True)
        self._file = (Path(log_dir) / f"rank{os.environ['RANK']}.jsonl").open("a")

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        print(json.dumps({"name": name, "value": float(value), "step": step}), file=self._file, flush=True)

    def add_text(self, *_: Any, **__: Any) -> None:
        pass

    def flush(self) -> None:
        pass


def install_fake_tensorboard() -> None:
    """Let Megatron find it in this process and its forks."""
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    sys.modules["torch.utils.tensorboard"] = module
