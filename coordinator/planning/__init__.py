"""The hierarchical planner: ThunderServe's two levels, mixed replicas, prices, links."""
