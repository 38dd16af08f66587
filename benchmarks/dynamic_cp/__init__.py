"""Context-parallel sizes of their own for micro-batches: plans and measured step times."""
