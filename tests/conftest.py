"""Adapters with a requirements.txt are tested in environments of their own: scripts/test_adapters.sh runs them there.

This file is not in tests/adapters: pytest would put that folder on the path, and its folders bear the names of packages.
"""

import sys
from pathlib import Path

ADAPTERS = Path(__file__).parent / "adapters"
collect_ignore = [
    str(requirements.parent)
    for requirements in ADAPTERS.glob("*/requirements.txt")
    if not sys.prefix.endswith(f"venv-{requirements.parent.name}")
]
