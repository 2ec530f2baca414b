"""Engines started for a self-test or a benchmark, on this machine alone."""
