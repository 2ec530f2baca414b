"""Faults of many kinds on a network of real processes, under streams of clients: `python -m p2pserve.sdk.chaos`."""
