"""The lower level: what given replicas can serve, and how requests are shared out."""
