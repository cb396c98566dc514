"""Sharding of model parameters, gradients and optimizer state over ranks, in unequal parts."""
