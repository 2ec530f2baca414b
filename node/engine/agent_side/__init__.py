"""What the agent has of its engines: the process that forks them, and one link to each."""
