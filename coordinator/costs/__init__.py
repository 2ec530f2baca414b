"""What things cost: models, GPUs, iterations of engines, and KV on its way."""
