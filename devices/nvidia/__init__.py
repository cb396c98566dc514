"""NVIDIA GPUs, which are found and read through NVML."""
