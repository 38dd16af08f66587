"""Samples: their tensors and schema, their bytes, and the rows and micro-batches that hold them."""
