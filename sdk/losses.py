"""What a client sees when a box of its answer is killed or hangs: `python -m p2pserve.sdk.losses`."""

import sys

from .live.losses import main

if __name__ == "__main__":
    sys.exit(main())
