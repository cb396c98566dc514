"""What measurements say of devices: step times, memory, contention and the cost of exchange."""
