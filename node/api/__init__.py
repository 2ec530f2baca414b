"""The agent's side of the box's API process: what runs it, whose keys count, and how its requests reach the gateway."""
