"""Hooks in other systems: checked tables of them, installed as a whole and undone."""

from megatron_balance.hooking.installation import Installation, check_version
from megatron_balance.hooking.patches import Function, Hook, Patches
from megatron_balance.hooking.patches import install as install_hooks

__all__ = ["Function", "Hook", "Installation", "Patches", "check_version", "install_hooks"]
