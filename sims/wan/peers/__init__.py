"""Ours beside other programs that do the same, on the same emulated links: `python -m p2pserve.sims.wan peers`."""
