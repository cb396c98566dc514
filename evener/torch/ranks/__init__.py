"""The ranks of a training run: their devices, step times, and detection of exited ranks."""
