"""The equality matrix: balanced training against unbalanced training, everywhere this package claims to run."""
