"""Starts a training by a plan: a process for each share, by PyTorch's elastic agent or as children
of this process.
"""
