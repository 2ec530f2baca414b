"""Which replicas serve a request: the interface of routing policies, the policies of the network,
and their router.

A policy is chosen by name (`RoutingSettings.policy`). To add one: write it in a file of its own
beside `plan_and_queues`, and enter it in `policies.NETWORK_POLICIES`. Policies that only
simulations compare with are in `sims/policies`.
"""
