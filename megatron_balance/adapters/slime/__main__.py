"""Runs a slime training script with balanced schedules: `python -m megatron_balance.adapters.slime train.py ARGS`."""

import sys

from megatron_balance.adapters.kit import launch
from megatron_balance.adapters.slime import install

if __name__ == "__main__":
    usage = "python -m megatron_balance.adapters.slime SCRIPT [ARGS ...]"
    launch(sys.argv[1:], install=install, usage=usage)
