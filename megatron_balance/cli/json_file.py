"""Writes the file that `--json` names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_balance.errors import BalanceError


def write_json(file: Path, content: Any, *, indent: int | None = None) -> None:
    """Write JSON.

    Raises:
        BalanceError: the file cannot be written.
    """
    try:
        file.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
    except OSError as error:
        raise BalanceError(f"--json is {str(file)!r}: it cannot be written ({error.strerror}).") from error
