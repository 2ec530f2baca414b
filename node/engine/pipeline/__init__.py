"""A replica whose stages live on different boxes: the head's executor, the process of another stage, and what they say.

vLLM's engine runs on the head, stage 0, and sees one executor. Every other stage is a process with one vLLM worker,
which the head calls over a control pipe; activations go from each stage to the next one over a data pipe. There is no
torch.distributed world that they share, and nothing is pickled.
"""
