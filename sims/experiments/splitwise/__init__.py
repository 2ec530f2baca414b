"""Splitwise's evaluation again: its clusters, and what moving KV costs."""
