"""Who a peer is and what it may do: keys, identities, join tokens, admission."""
