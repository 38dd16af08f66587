"""Faults in training runs: what happens, and what every rank must make of it."""
