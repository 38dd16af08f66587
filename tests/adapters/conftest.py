"""Folders with a requirements.txt belong to an environment of their own: scripts/test_adapters.sh runs them there."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
collect_ignore = [
    str(requirements.parent)
    for requirements in HERE.glob("*/requirements.txt")
    if not sys.prefix.endswith(f"venv-{requirements.parent.name}")
]
