"""The simulator: runs the coordinator's own code in virtual time."""
