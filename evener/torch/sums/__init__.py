"""Sums over ranks: buckets of gradients and their exchange, and other collectives."""
