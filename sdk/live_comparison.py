"""A live run of emulated nodes against the same run simulated: `python -m p2pserve.sdk.live_comparison`."""

import sys

from .live.comparison_command import main

if __name__ == "__main__":
    sys.exit(main())
