"""Sharding of a model over ranks in unequal parts: parameters, gradients and optimizer state."""
