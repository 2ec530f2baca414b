"""What engine processes cost over vLLM itself: `python -m p2pserve.node.engine.bench`."""

import sys

from .dev.bench import main

if __name__ == "__main__":
    sys.exit(main())
