"""Audits of a PyTorch training run.

An audit computes the gradient of a few rows twice, as on one device and as in the split training
run, and compares the results.
"""
