"""What one client can take of another, measured on emulated nodes: `python -m p2pserve.sdk.overload`."""

import sys

from .live.overload import main

if __name__ == "__main__":
    sys.exit(main())
