"""Models of the step time and memory of devices, fitted to a few measurements."""
