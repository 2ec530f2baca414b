"""One replica's engine in virtual time."""
