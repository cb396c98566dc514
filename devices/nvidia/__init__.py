"""NVIDIA GPUs, by the readings that NVML gives."""
