"""Models of devices, fitted to measurements: step time, memory and the cost of exchange."""
