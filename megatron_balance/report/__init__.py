"""HTML reports and traces of balanced runs: predicted gain, measured imbalance and planning time."""
