"""How fast a link moves KV: `python -m p2pserve.kvtransport.bench`."""

import sys

from .dev.bench import main

if __name__ == "__main__":
    sys.exit(main())
