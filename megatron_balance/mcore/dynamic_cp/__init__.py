"""Context-parallel groups of several sizes, and the forward pass of a micro-batch in one of them."""

from megatron_balance.mcore.dynamic_cp.groups import ContextGroups, connect, make_context_groups

__all__ = ["ContextGroups", "connect", "make_context_groups"]
