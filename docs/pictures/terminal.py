"""Draws terminal.svg: what `compare` prints on a terminal."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_balance.cli import main

PICTURE = Path(__file__).with_suffix(".svg")
COMMAND = (
    "compare synthetic:reasoning_gym:2048 --data samples --global-batch-size 128 --dp-size 8 "
    "--max-tokens-per-gpu 16384 --model Qwen/Qwen3-8B --device 400"
)


def picture() -> str:
    """The terminal after the command; the milliseconds of a plan are those of this machine."""
    console = Console(record=True, width=126, file=io.StringIO(), force_terminal=True)
    console.print(f"$ megatron-balance {COMMAND}", style="bold cyan", highlight=False)
    os.environ["FORCE_COLOR"] = "1"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(COMMAND.split()) == 0
    console.print(Text.from_ansi(printed.getvalue()))
    svg = console.export_svg(title="megatron-balance compare", clear=False)
    # The fonts would be fetched from a server.
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
