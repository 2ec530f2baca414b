"""What is known before a request is routed: how fast replicas are, and how long answers get."""
