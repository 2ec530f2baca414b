"""Engine processes: vLLM, its KV connector and the fork server that starts them.

The agent imports `protocol` only; everything else here is for processes that have torch and vLLM.
"""
