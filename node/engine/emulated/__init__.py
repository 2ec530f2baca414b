"""An engine whose GPU is a model of one: real scheduling, real KV transfers, modelled time, made-up
tokens.

It speaks the protocol of the real engine and imports neither torch nor vLLM. Everything it says of
itself says `emulated`.
"""
