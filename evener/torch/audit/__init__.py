"""Audits of a PyTorch training run.

An audit computes the gradient of a few rows twice: once as on one device, and once as in the
training run. It compares the results.
"""
