"""Benchmarks of this room. Nothing that a node runs."""
