"""What is run once on a GPU before it is believed: `p2pserve selftest --full`, or `make gpu-check` in a checkout.

`verdicts` decides (order, shares of the time, what passes), `run` starts each part in a process of its own, `parts` are
the programs that exist only for this, `synchronisations` finds where a step waits for the device.
"""
