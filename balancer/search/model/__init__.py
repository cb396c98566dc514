"""Models of devices by measurements: step times, memory and the cost of exchange."""
