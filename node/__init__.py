"""What runs on a box: the agent, its engine processes and the gateway for clients."""
