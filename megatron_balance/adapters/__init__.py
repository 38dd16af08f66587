"""Thin translators: adapters for five systems, each driven by the planner.

An adapter turns its system's lengths and batches into the planner's input, and the plan back; it has no partition
algorithm and no exchange of its own. `kit` has what all of them need.

Importing one patches nothing: `install()` does, after checking every target, and what it returns has `undo()`.
"""
