"""NVIDIA GPUs: what NVML reports, MPS, and other work on a GPU."""
