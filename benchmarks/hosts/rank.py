"""One rank of a run over two hosts: trains as tests/kit/record_steps.py does, and records its identity and its end.

    torchrun … tests/kit/cpu_shim.py benchmarks/hosts/rank.py RECORD_DIR ARGS

Writes RECORD_DIR/rankN.pid, and RECORD_DIR/rankN.end.json when an error ends it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import record_steps

from megatron_balance.errors import BalanceError


def main() -> None:
    """Train; an error is noted and goes on its way."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    rank = os.environ["RANK"]
    (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
    try:
        record_steps.main()
    except (BalanceError, RuntimeError) as error:
        note = {"error": type(error).__name__, "message": str(error), "waited_in": _waited_in(error)}
        (folder / f"rank{rank}.end.json").write_text(json.dumps(note))
        raise


def _waited_in(error: BaseException) -> str:
    """The innermost function of ours or of Megatron, of the error that came first."""
    while error.__cause__ is not None:
        error = error.__cause__
    function = "torch"
    for frame in traceback.extract_tb(error.__traceback__):
        for package in ("megatron_balance", "megatron"):
            _, package_path, module = frame.filename.partition(f"/{package}/")
            if package_path:
                function = f"{package}/{module.rsplit(f'/{package}/')[-1]}:{frame.name}"
                break
    return function


if __name__ == "__main__":
    main()
