"""Arithmetic of what a batch is worth in learning."""
