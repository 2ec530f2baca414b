"""How soon a network of boxes is whole, notices losses, and what it costs: `python -m p2pserve.bootstrap.bench`."""

import sys

from .dev.bench import main

if __name__ == "__main__":
    sys.exit(main())
