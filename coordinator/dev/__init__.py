"""What only benchmarks and comparisons use: other planners, exhaustive search. Nothing that a node
runs."""
