"""Collectives over the ranks: the sum of gradients in buckets, and others."""
