"""The upper level: the search for groups of GPUs and their phases."""
