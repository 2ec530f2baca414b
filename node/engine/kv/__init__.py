"""vLLM's KV connector, in the parts that vLLM cuts it into: one for the scheduler, one for each worker, and what the
first tells the others with each step. `switchboard` joins the workers' transfers with the node's agent.
"""
