"""How much of a KV transfer is hidden behind prefill: `python -m p2pserve.node.bench`."""

import sys

from .dev.bench import main

if __name__ == "__main__":
    sys.exit(main())
