"""Megatron: flags, hooks, and the data iterator that hands balanced micro-batches to its training loop."""
