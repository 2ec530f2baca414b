"""KV transport: links and tickets, both ends of a transfer, relays, path choice and link
measurement.

Nothing here imports torch, so the agent process, which never does, can issue tickets and choose
paths. Payloads are opaque bytes; `kernels.codec` makes and reads them.
"""
