"""What measurements say of devices: step times, memory and the cost of exchange."""
