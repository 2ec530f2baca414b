"""A box's part in replicas: engine processes, stages, and work for requests."""
