"""KV transfers over an emulated wide-area network."""
