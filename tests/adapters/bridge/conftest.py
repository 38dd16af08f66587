"""The process whose forks are ranks (tests/megatron/forked_runs.py) is used here as well."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "megatron"))
# ModelOpt imports PyArrow, whose allocator starts a thread otherwise, which a fork would lack.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
