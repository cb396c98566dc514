"""The rows that a PyTorch process trains on: which they are, how batches are fetched, and what
loops over them.
"""
