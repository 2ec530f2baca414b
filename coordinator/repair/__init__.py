"""What the coordinator makes of boxes that fail, come back, or are about to end, and when it plans at once."""
