"""Several engines in one process, which step one at a time."""
