"""Routing policies that only simulations use, for comparison."""
