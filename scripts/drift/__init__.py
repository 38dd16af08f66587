"""Hooked and relied-on definitions of other packages against what was reviewed: scripts/check drift."""
