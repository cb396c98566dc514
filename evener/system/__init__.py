"""Functions that use Linux: files, signals, CPU cores and memory limits."""
