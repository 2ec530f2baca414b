"""The two ends of a link: state machines, connections, relays."""
