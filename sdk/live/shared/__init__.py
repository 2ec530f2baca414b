"""Services that share boxes, live and simulated."""
