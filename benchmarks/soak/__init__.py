"""A long run with everything on: does it hold on to memory, files or threads, and what does it add to a step?"""
