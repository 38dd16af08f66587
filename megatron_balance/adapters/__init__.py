"""Thin translators: the five systems that ask for balancing, each driven by `build_data_schedule`.

An adapter turns its system's lengths and batches into the planner's, and the plan back; it partitions nothing
itself. Importing one patches nothing: `install()` does, after checking every target, and what it returns has
`undo()`.
"""
