"""Clients' requests: the gateway, and between text and tokens."""
