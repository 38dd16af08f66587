"""Each adapter's planning beside that of its system."""
