"""The vLLM engine: its process, its device, its paged KV cache."""
