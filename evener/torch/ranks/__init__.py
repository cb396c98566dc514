"""The ranks of a training: their devices, their step times, and detection of exited ranks."""
