"""The life of one request at its gateway, as a machine without I/O; gateways and the simulator run
the same one."""
