"""Mutated inputs against both ends of a link: `python -m p2pserve.kvtransport.fuzz`."""

import sys

from .dev.fuzz import main

if __name__ == "__main__":
    sys.exit(main())
