"""`p2pserve demo`: a whole network on one machine."""
