"""The PyTorch models that ship with evener."""
