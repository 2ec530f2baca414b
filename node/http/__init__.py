"""HTTP over the network's own sessions: a front that listens, and boxes whose API servers answer."""
