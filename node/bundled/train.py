"""Trains a bundled model: `python -m p2pserve.node.bundled.train`."""

from ..dev.train import main

if __name__ == "__main__":
    main()
