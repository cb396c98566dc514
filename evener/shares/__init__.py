"""Divide batches among devices so that all devices finish at the same time."""
