"""Prefixes of prompts whose KV replicas hold: their names, what is told of them, and who holds how much of a prompt."""
