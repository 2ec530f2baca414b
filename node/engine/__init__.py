"""Engine processes: vLLM, its KV connector and their fork server. The agent imports `protocol`
only; the rest needs torch and vLLM."""
