"""Benchmarks of engine processes. Nothing that a node runs."""
