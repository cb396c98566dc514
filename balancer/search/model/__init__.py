"""Model time and memory of devices from a few measurements."""
