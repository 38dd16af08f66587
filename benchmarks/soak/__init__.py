"""A long run with everything on: does it hold on to memory, files or threads, and what does it add to a step?"""

GLOBAL_BATCH_SIZE = 16
STEPS_PER_SWING = 256
"""The lengths' median goes up and down once in so many steps (`drifting.py`)."""
