"""Training with measured seconds as the cost, against FLOPs: see `__main__.py`."""
