"""Start a training run with a plan, one process per share.

The processes are started by this process itself, or by PyTorch's elastic agent.
"""
