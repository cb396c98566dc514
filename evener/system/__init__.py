"""Access to Linux: files, signals, CPU cores and memory limits."""
