"""`python -m megatron_balance.launch` on a machine without a GPU: Megatron computes on the CPU (`cpu_shim.py`).

torchrun --nproc-per-node 2 tests/kit/cpu_launch.py SCRIPT ARGS
"""

from __future__ import annotations

import sys
from pathlib import Path

from cpu_shim import enable_cpu, patch_megatron

from megatron_balance.launch import main
from megatron_balance.mcore import install

if __name__ == "__main__":
    if len(sys.argv) > 1:  # Megatron may lie beside the script, as for the launcher
        sys.path.insert(0, str(Path(sys.argv[1]).resolve().parent))
    enable_cpu()
    install()
    patch_megatron()
    main()
