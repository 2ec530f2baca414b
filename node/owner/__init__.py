"""What the owner of a box tells its node while it runs: to take no new requests, and to take them again."""
