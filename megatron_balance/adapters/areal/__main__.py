"""Runs an AReaL script or module with the hooks installed: a trainer, or a worker of the single controller."""

from megatron_balance.adapters.kit import launch

if __name__ == "__main__":
    launch("megatron_balance.adapters.areal")
