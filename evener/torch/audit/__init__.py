"""The audit of a PyTorch training.

It compares the gradient of a few rows, as one device computes it, with that of the
path that trains.
"""
