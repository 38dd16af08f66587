"""Settings of all tests: examples repeat and are not timed; what needs other packages runs where they are.

Adapters with a requirements.txt are tested in environments of their own (scripts/check adapters), and so are other
releases of Megatron and of torch (scripts/check versions). This file is not in tests/adapters: pytest would put that
folder on the path, and its folders bear the names of packages.
"""

import os
import sys
from pathlib import Path

from hypothesis import settings

ADAPTERS = Path(__file__).parent / "adapters"
collect_ignore = [
    str(requirements.parent)
    for requirements in ADAPTERS.glob("*/requirements.txt")
    if not sys.prefix.endswith(f"venv-{requirements.parent.name}")
]
if not any(kind in sys.prefix for kind in ("venv-mcore", "venv-torch")) and "MEGATRON_CHECKOUT" not in os.environ:
    collect_ignore.append(str(Path(__file__).parent / "versions"))

# The same examples in every run; `make test-all` explores others. Machines are shared: no example has a deadline.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.register_profile("exploring", deadline=None)
settings.load_profile("exploring" if os.environ.get("MEGATRON_BALANCE_EXPLORE") else "repeatable")
