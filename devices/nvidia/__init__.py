"""NVIDIA GPUs: discovery and readings through NVML."""
