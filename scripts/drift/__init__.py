"""Compares what is hooked and relied on in another system with what was reviewed there, without importing it."""
