"""The API process: vLLM's own API server, whose engine is the network. Forked from the fork server, like engines."""
