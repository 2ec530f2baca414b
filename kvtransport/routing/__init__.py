"""Which path the KV takes, predicted and steered. Pure."""
