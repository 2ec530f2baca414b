"""What is run once on a GPU before it is believed: `p2pserve selftest --full`, or `make gpu-check`.

`verdicts` decides, `run` starts each part in a process, `parts` are programs for this alone,
`synchronisations` finds waits for the device."""
