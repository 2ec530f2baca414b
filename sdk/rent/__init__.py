"""`p2pserve rent`: what to rent, and how."""
