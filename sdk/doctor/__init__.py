"""`p2pserve doctor`: whether this box is fit to join."""
