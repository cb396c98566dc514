"""Slices of the CPU as devices."""
