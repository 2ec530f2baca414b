"""How the elected coordinator plans: beside the agent, in a process of its own, with limits."""
