"""The lower level: what a given set of replicas can serve, and how requests are shared among
them."""
