"""The hosts of a Ray cluster: their devices, and an actor on each host
that works for this process.
"""
