"""Benchmarks and fuzzing of this room. Nothing that a node runs."""
