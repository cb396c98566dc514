"""Ranks of a training run, with their devices, process groups, step times and reports."""
