"""verl on a CPU, in this process and in those that it starts: its own environment variables, before it is imported."""

import importlib.util
import os
import sys
from pathlib import Path

UPSTREAM = str(Path(__file__).parents[3] / ".ci" / "upstream")

if importlib.util.find_spec("tensordict") is not None:
    os.environ["VERL_PLATFORM"] = "cpu"
    # The plug-in as well: without its variable it must do nothing, here and in every process of these tests.
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_cpu_platform,megatron_balance.adapters.verl.plugin"
    os.environ.pop("MEGATRON_BALANCE_VERL", None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [UPSTREAM, os.environ.get("PYTHONPATH")]))
    sys.path.insert(0, UPSTREAM)
