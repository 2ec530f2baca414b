"""The catalogue of services on a node: changed where the network's key is, and followed everywhere."""
