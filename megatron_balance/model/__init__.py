"""Sizes of a model, and the FLOPs, weights and pipeline chunks that follow from them."""
