"""Benchmarks, and the training of the bundled models. Nothing that a node runs."""
