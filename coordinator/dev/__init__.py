"""What only benchmarks and comparisons use: other planners. Nothing that a node runs."""
