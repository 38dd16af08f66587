"""Stands in for TorchSpec, without Ray: the signatures and the fields that the adapter relies on, nothing more."""
