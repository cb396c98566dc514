"""NVIDIA GPUs: the readings that NVML gives, and MPS."""
