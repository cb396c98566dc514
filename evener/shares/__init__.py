"""Divide batches among devices so that all finish at the same time."""
