"""Benchmark: growth of the work of a step and of the start with the number of ranks, measured and modelled."""
