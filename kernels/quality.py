"""What the codecs cost in quality: `python -m p2pserve.kernels.quality`."""

import sys

from .dev.quality import main

if __name__ == "__main__":
    sys.exit(main())
