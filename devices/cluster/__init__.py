"""The hosts of a Ray cluster: their devices, and an actor on each that works for this process."""
