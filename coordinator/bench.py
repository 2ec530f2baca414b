"""How long planning takes, and how good the plans are: `python -m p2pserve.coordinator.bench`."""

import sys

from .dev.bench import main

if __name__ == "__main__":
    sys.exit(main())
