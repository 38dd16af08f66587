"""Faults in training runs, and what every rank makes of them."""
