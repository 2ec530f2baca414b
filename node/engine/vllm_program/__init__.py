"""vLLM as one engine: its record, what it preloads, its arguments, and the program of its process."""
