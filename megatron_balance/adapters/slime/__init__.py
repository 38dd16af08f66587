"""slime adapter: the schedule of a rollout batch (THUDM/slime) is made by `build_data_schedule`.

    from megatron_balance.adapters.slime import install
    patches = install()      # in the driver, before RolloutManager is started
    patches.undo()

slime's own flags turn balancing on: without `--balance-data` or `--balance-by-flops` its own function runs.
"""

from megatron_balance.adapters.slime.hooks import SUPPORTED_VERSIONS, install, is_installed
from megatron_balance.adapters.slime.masked_copies import MaskedCopy
from megatron_balance.adapters.slime.settings import SlimeOptions

__all__ = ["SUPPORTED_VERSIONS", "MaskedCopy", "SlimeOptions", "install", "is_installed"]
