"""What watching a run costs."""

WATCHED = (True, False, False, True)
"""Whether a step is watched, in turn, so that what drifts slowly meets both alike."""
