"""The audit of a PyTorch training run.

An audit computes the gradient of a few rows twice, as one device would and as the split training
run does, and compares both.
"""
