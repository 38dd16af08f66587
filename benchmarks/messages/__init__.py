"""Messages between pipeline stages, counted in training runs."""
