"""Benchmarks of the codecs and measurements of their quality. Nothing that a node runs."""
