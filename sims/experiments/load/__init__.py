"""More requests than a cluster can serve."""
