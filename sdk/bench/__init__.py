"""`p2pserve bench`: load on a running network, and what its client sees of it."""
