"""The audit of a PyTorch training.

The gradient of a few rows, as one device computes it, beside that of the way that trains.
"""
