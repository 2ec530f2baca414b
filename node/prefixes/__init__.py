"""Prefix caches across boxes: who tells what it holds, who asks, and whose requests share it."""
