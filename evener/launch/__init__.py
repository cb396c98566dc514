"""Start a training run with a plan, one process per share.

The processes are children of this process, or run by PyTorch's elastic agent.
"""
