"""Starts a training run by a plan: one process per share, run by PyTorch's elastic agent or
as children of this process.
"""
