"""Who is in the network: membership, gossip, election. Pure state machines."""
