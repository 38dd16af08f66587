"""Compares definitions that are hooked or relied on in another system with the reviewed ones, without importing it."""
