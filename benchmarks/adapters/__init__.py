"""Figures that adapters are held to; run as `python -m benchmarks.adapters.NAME`."""
