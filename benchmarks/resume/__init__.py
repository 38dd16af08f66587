"""Training runs that are killed, and go on from their newest checkpoint."""
