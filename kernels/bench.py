"""How fast the codecs are: `python -m p2pserve.kernels.bench`."""

import sys

from .dev.bench import main

if __name__ == "__main__":
    sys.exit(main())
