"""Arithmetic for shares: whole rows, passes, step-time curves and the fastest shares."""
