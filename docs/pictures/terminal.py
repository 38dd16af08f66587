"""Draws terminal.svg: what `compare` prints on a terminal with rich (`pip install '.[cli]'`)."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_balance.cli import main, terminal

PICTURE = Path(__file__).with_suffix(".svg")
COMMAND = (
    "compare synthetic:reasoning_gym:2048 --data samples --global-batch-size 128 --dp-size 8 "
    "--max-tokens-per-gpu 16384 --model Qwen/Qwen3-8B --device 400"
)


class Terminal(Console):
    """It wraps lines, as a terminal does."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        """Print, and leave `soft_wrap` out."""
        super().print(*objects, **options)


def picture() -> str:
    """The terminal after the command; the milliseconds of a plan are those of this machine."""
    console = Terminal(record=True, width=126, file=io.StringIO(), force_terminal=True)
    terminal._rich = lambda stream: console if stream is sys.stdout else None  # a bar would stay in the picture
    console.print(f"$ megatron-balance {COMMAND}", style="bold cyan", highlight=False)
    assert main(COMMAND.split()) == 0
    svg = console.export_svg(title="megatron-balance compare", clear=False)
    # The fonts would be fetched from a server.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
