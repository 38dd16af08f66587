"""The double of recsys-examples in the path, here and in the ranks of a test."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "upstream_double"))

collect_ignore = ["test_recsys_pipeline.py"]
"""Needs a checkout in place of the double: `scripts/check upstream` runs it without this file."""
