"""Policies beside each other on real engines: `python -m p2pserve.sdk.contest`."""
