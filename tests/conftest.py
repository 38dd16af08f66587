"""What holds for all tests: no example is timed, and adapters run where their packages are.

Adapters with a requirements.txt are tested in environments of their own (scripts/test_adapters.sh). This file is not
in tests/adapters: pytest would put that folder on the path, and its folders bear the names of packages.
"""

import sys
from pathlib import Path

from hypothesis import settings

ADAPTERS = Path(__file__).parent / "adapters"
collect_ignore = [
    str(requirements.parent)
    for requirements in ADAPTERS.glob("*/requirements.txt")
    if not sys.prefix.endswith(f"venv-{requirements.parent.name}")
]

# Machines are shared: a deadline for an example would fail at random.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
