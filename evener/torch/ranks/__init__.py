"""Ranks of a training run: devices, process groups, step times and reports."""
