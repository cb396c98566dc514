"""PyTorch workloads."""
