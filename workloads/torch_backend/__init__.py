"""Workloads for PyTorch."""
