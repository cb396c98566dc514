"""NVIDIA GPUs: what NVML reports, MPS, and other work on a GPU."""

MPS_PROGRAM = "nvidia-cuda-mps-control"
