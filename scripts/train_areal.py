"""An example: AReaL's own training script on balanced ranks, the first of which rolls out for all.

AREAL_TRAIN_SCRIPT is the script, BALANCE_MODEL the model that FLOPs are counted of; scripts/run_rl_areal.sh sets both
and starts one process a rank. The one line that balances is `install`.
"""

from __future__ import annotations

import os
import runpy

from megatron_balance.adapters import areal


def main() -> None:
    areal.install(model=os.environ["BALANCE_MODEL"], single_rank_load=True)
    runpy.run_path(os.environ["AREAL_TRAIN_SCRIPT"], run_name="__main__")


if __name__ == "__main__":
    main()
