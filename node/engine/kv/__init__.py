"""vLLM's KV connector: the scheduler's part, each worker's, and what the first tells them with each
step. `switchboard` joins the workers' transfers with the node's agent."""
