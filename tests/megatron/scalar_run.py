"""record_steps.py with a TensorBoard of our own, which writes what it is told to TENSORBOARD_DIR/rankN.jsonl.

TensorBoard itself is no package of the tests. Megatron makes the writer, on the rank and with the arguments it chooses.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


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


if __name__ == "__main__":
    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    sys.modules["torch.utils.tensorboard"] = module
    sys.path.insert(0, str(ROOT / "scripts"))
    import record_steps

    record_steps.main()
