"""Benchmark: the cost of watching a run."""

WATCHED = (True, False, False, True)
"""The order of watched and unwatched steps, in which slow drift affects both equally."""
