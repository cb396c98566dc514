"""Starts a training run with a plan, one process per share.

The processes are run by PyTorch's elastic agent or as children of this process.
"""
