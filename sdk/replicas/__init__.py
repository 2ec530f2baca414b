"""Several nodes on one box, each with its part of the GPUs: `p2pserve join --replicas`."""
