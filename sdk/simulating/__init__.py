"""`p2pserve sim`: requests against a plan, in virtual time, and what changes meanwhile."""
