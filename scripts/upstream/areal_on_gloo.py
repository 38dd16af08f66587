"""Runs one of AReaL's scripts for NCCL ranks over gloo on CPU, with the adapter on: `areal_on_gloo.py SCRIPT ARGS`.

The script pickles what the redistribution returned and AReaL's test reads `all_data`, so that is filled.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch.distributed as dist

from megatron_balance.adapters import areal


def main() -> None:
    # As `python SCRIPT` has them.
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)

    areal.install(gather_all=True)
    from areal.infra.platforms import current_platform

    init_process_group = dist.init_process_group
    dist.init_process_group = lambda backend: init_process_group("gloo")
    current_platform.set_device = lambda index: None
    runpy.run_path(sys.argv[0], run_name="__main__")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
