"""A long run with everything on, for leaks of memory, files and threads."""

GLOBAL_BATCH_SIZE = 16
STEPS_PER_SWING = 256
"""Steps in which the lengths' median goes up and down once (`drifting.py`)."""
