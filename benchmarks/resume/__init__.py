"""Training runs that are killed and resumed from their newest checkpoint."""
