"""Ranks of a training run: their devices, process groups, step times and reports."""
