"""recsys-examples adapter: the batch shuffler of its HSTU and SID-GR trainings, driven by this package's planner.

`install()` puts this planner and this exchange behind every balanced shuffler of that repository, and registers one
more, "megatron_balance". In a step:

    1. the shuffler computes the cost of each row, int64                      `workloads.py`
    2. all ranks learn the workloads and lengths of all real rows             `global_rows.py`
    3. the planner gives each row a rank                                      `plan.py`
    4. the rows move, by all-to-all or by all-gather                          `transport.py`
    5. the batch is put together again, real rows ascending, padding last     `layout.py`

Step 3 may run in a thread while the model computes (`shuffler.py`). Importing this patches nothing and needs no
torchrec.
"""

from megatron_balance.adapters.recsys.hooks import Installed, install, is_installed

__all__ = ["Installed", "install", "is_installed"]
