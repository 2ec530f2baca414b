"""The hierarchical planner: ThunderServe's two levels, with mixed replicas, prices, and links as
they are."""
