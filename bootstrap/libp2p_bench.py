"""How fast one py-libp2p stream is: `python -m p2pserve.bootstrap.libp2p_bench`."""

import sys

from .dev.libp2p_bench import main

if __name__ == "__main__":
    sys.exit(main())
