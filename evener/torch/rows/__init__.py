"""The rows that a PyTorch process trains on: their order, batches and loaders."""
