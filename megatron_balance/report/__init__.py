"""Pictures and records of balanced runs: what would be gained, what happens, what it cost."""
