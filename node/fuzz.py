"""Hostile members against the control plane, through to the planner: `python -m p2pserve.node.fuzz`."""

import sys

from .dev.fuzz import main

if __name__ == "__main__":
    sys.exit(main())
